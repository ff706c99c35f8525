"""GPUs of this machine, by the file that stands in for the driver, and leases on them: the locks are real."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from serin.errors import LeaseUnavailable, SpecError
from serin.machine.hardware import Device, inventory
from serin.machine.leases import (
    SLOTS,
    Priority,
    holders,
    lease,
    waiters,
)
from tests.fakes.gpus import pretend_gpus
from tests.kit.commands import run
from tests.kit.waiting import until
from tests.logs import heard

ROOT = Path(__file__).parents[2]
HOLD = """
import sys
from pathlib import Path
from serin.machine.leases import lease
home, count, kind, priority = sys.argv[1:]
with lease(int(count), home=Path(home), purpose="child", shared=kind == "shared", priority=priority):
    print("held", flush=True)
    sys.stdin.read()
"""
GB = 1 << 30


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pretend_gpus(tmp_path, monkeypatch, ["GPU-a", "GPU-b"])
    return tmp_path


@contextmanager
def child(
    home: Path, count: int, kind: str = "exclusive", priority: Priority = "normal"
) -> Iterator[subprocess.Popen[str]]:
    """A process that wants `count` devices and holds them until it is ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home), str(count), kind, priority],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def holding_child(home: Path, count: int, kind: str = "exclusive") -> Iterator[subprocess.Popen[str]]:
    with child(home, count, kind) as process:
        assert process.stdout.readline() == "held\n"
        yield process


def refuse(
    home: Path, count: int, match: str | None = None, error: type[Exception] = LeaseUnavailable, **wanted: Any
) -> Any:
    """The error with which a lease is refused."""
    with pytest.raises(error, match=match) as caught, lease(count, home=home, **wanted):
        pass
    return caught.value


def test_leases_never_share_a_device(home: Path) -> None:
    with lease(1, home=home) as first, lease(1, home=home) as second:
        assert {*first.ids, *second.ids} == {"GPU-a", "GPU-b"}


def test_a_lease_on_nothing_has_no_device(home: Path) -> None:
    with lease(0, home=home) as none:
        assert none.ids == ()


def test_more_devices_than_there_are_is_refused_at_once(home: Path) -> None:
    refuse(home, 3, r"3 GPU\(s\) wanted, 2 here")


def test_the_wait_is_bounded_and_its_end_names_the_holder(home: Path) -> None:
    with lease(2, home=home, purpose="train flights"):
        assert refuse(home, 1, "train flights", wait_s=0.1).retryable
        assert {holder.device for holder in holders(home)} == {"GPU-a", "GPU-b"}
    assert holders(home) == ()


@pytest.mark.parametrize("kind", ["exclusive", "shared"])
def test_kill_9_frees_the_lease(home: Path, kind: str) -> None:
    with holding_child(home, 2, kind) as child:
        assert {holder.pid for holder in holders(home)} == {child.pid}
        child.send_signal(signal.SIGKILL)
        with lease(2, home=home, wait_s=60) as ours:
            assert len(ours.ids) == 2


def test_a_request_for_all_devices_is_not_starved_by_requests_for_one(home: Path) -> None:
    """The big request queues first; a small one behind it does not slip past, though one device is free."""
    order: list[str] = []
    waiting = threading.Event()

    def take(count: int, name: str, said: threading.Event) -> None:
        with heard(lambda _: said.set()), lease(count, home=home, wait_s=60):
            order.append(name)

    with ExitStack() as ours:
        ours.enter_context(lease(1, home=home))
        big = threading.Thread(target=take, args=(2, "big", waiting))
        big.start()
        assert waiting.wait(30)
        small_waits = threading.Event()
        small = threading.Thread(target=take, args=(1, "small", small_waits))
        small.start()
        assert small_waits.wait(30)
        assert order == []
    deadline = time.monotonic() + 60
    for thread in (big, small):
        thread.join(deadline - time.monotonic())
    assert order == ["big", "small"]


def test_those_who_wait_are_served_in_the_order_of_coming(home: Path) -> None:
    order: list[int] = []
    threads = []

    def take(number: int) -> None:
        with lease(2, home=home, purpose=f"number {number}", wait_s=30):
            order.append(number)

    with lease(1, home=home):
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            until(lambda number=number: len(waiters(home)) == number + 1)
        assert [waiter.purpose for waiter in waiters(home)] == [f"number {number}" for number in range(5)]
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3, 4]
    assert waiters(home) == ()


def test_who_dies_while_waiting_holds_nobody_up(home: Path) -> None:
    with ExitStack() as ours:
        ours.enter_context(lease(1, home=home))
        with child(home, 2) as waiting:
            until(lambda: len(waiters(home)) == 1)
            assert waiters(home)[0].pid == waiting.pid
            waiting.send_signal(signal.SIGKILL)
            waiting.wait(10)
            assert waiters(home) == ()
            with lease(1, home=home, wait_s=60) as second:
                assert len(second.ids) == 1


def test_a_shared_lease_keeps_an_exclusive_one_away_and_leaves_whole_devices_free(home: Path) -> None:
    with lease(1, home=home, shared=True) as first, lease(1, home=home, shared=True) as second:
        assert first.ids == second.ids
        with lease(1, home=home, wait_s=0.1) as whole:
            assert whole.ids != first.ids
        refuse(home, 2, wait_s=0.1)
        assert [holder.kind for holder in holders(home)] == ["shared", "shared"]


def test_an_exclusive_lease_keeps_shared_ones_away(home: Path) -> None:
    with lease(2, home=home, purpose="train flights"):
        refuse(home, 1, "train flights", shared=True, wait_s=0.1)


def test_a_device_has_so_many_slots_and_no_more(home: Path) -> None:
    with ExitStack() as many:
        for _ in range(2 * SLOTS):
            many.enter_context(lease(1, home=home, shared=True, wait_s=5))
        refuse(home, 1, shared=True, wait_s=0.1)


def test_shared_leases_never_promise_more_memory_than_there_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device of 1 GB, of which served models have a quarter: two that want 0.4 GB cannot be on one device."""
    monkeypatch.setenv("SERIN_SERVING_MEMORY", str(GB // 4))
    want = int(0.4 * GB)
    with (
        lease(1, home=home, shared=True, memory_bytes=want) as first,
        lease(1, home=home, shared=True, memory_bytes=want) as second,
    ):
        assert first.ids != second.ids
        with lease(1, home=home, shared=True, memory_bytes=GB // 4) as third:
            assert third.ids in (first.ids, second.ids)
        refuse(home, 1, shared=True, memory_bytes=want, wait_s=0.1)


def test_what_no_device_could_ever_give_is_refused_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_SERVING_MEMORY", str(GB // 4))
    refuse(home, 1, r"1 GPU\(s\) with 1\.1 GB each wanted", memory_bytes=GB - 1)


def test_memory_for_serving_that_is_not_a_number_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_SERVING_MEMORY", "2GB")
    refuse(home, 1, r"(?s)SERIN_SERVING_MEMORY.*'2GB' is not a number of bytes", SpecError)


def test_a_wait_ends_when_it_is_asked_to(home: Path) -> None:
    stop = threading.Event()
    with lease(2, home=home), heard(lambda _: stop.set()):
        refuse(home, 1, stop=stop)


def test_a_queue_whose_counter_was_damaged_continues(home: Path) -> None:
    with lease(2, home=home), child(home, 1):
        until(lambda: len(waiters(home)) == 1)
        (home / "gpus" / "queue.lock").write_text("not a number")
        with child(home, 1):
            until(lambda: len(waiters(home)) == 2)
            assert [waiter.ticket for waiter in waiters(home)] == [2, 3]


def test_ten_processes_at_once_never_share_what_is_exclusive_and_all_end(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "tests.chaos.lease_clients", "--rounds", "4", "--deaths", "8", cwd=ROOT)
    result = json.loads(done.stdout)
    print(result)
    assert result["leases"] >= 10 * 4
    assert result["killed"] == 8
    assert result["violations"] == result["left"] == 0


def test_the_inventory_file_stands_in_for_the_driver(home: Path) -> None:
    assert inventory()[0] == Device(id="GPU-a", name="Stand-in", memory_bytes=1 << 30)


def test_what_a_scheduler_did_not_give_us_is_not_in_the_inventory(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert [device.id for device in inventory()] == ["GPU-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert [device.id for device in inventory()] == ["GPU-b", "GPU-a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert inventory() == ()


def test_an_inventory_file_that_is_none_is_refused_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_INVENTORY", str(tmp_path / "absent.json"))
    with pytest.raises(SpecError, match=r"absent\.json"):
        inventory()


def test_a_device_id_cannot_be_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(tmp_path, monkeypatch, ["../../etc/x"])
    with pytest.raises(SpecError, match="is not a device id"):
        inventory()
