"""Leases on GPUs: exclusive, queued, freed by the kernel. The devices are a stand-in inventory, the locks are real."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from serin.errors import LeaseUnavailable, SpecError
from serin.hardware import Device, holders, inventory, lease

HOLD = """
import sys
from pathlib import Path
from serin.hardware import lease
with lease(int(sys.argv[2]), home=Path(sys.argv[1]), purpose="child"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_inventory(tmp_path, monkeypatch, ["GPU-a", "GPU-b"])
    return tmp_path


def write_inventory(folder: Path, monkeypatch: pytest.MonkeyPatch, ids: list[str]) -> None:
    devices = [{"id": name, "name": "Stand-in", "memory_bytes": 1 << 30} for name in ids]
    file = folder / "inventory.json"
    file.write_text(json.dumps({"format": "serin.inventory", "version": 1, "devices": devices}))
    monkeypatch.setenv("SERIN_INVENTORY", str(file))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@contextmanager
def holding_child(home: Path, count: int) -> Iterator[subprocess.Popen[str]]:
    """A process that holds `count` devices until it is ended."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    with child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            yield child
        finally:
            child.kill()


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
    write_inventory(tmp_path, monkeypatch, ["../../etc/x"])
    with pytest.raises(SpecError, match="is no device id"):
        inventory()


def test_leases_never_share_a_device(home: Path) -> None:
    with lease(1, home=home) as first, lease(1, home=home) as second:
        assert {*first.ids, *second.ids} == {"GPU-a", "GPU-b"}


def test_a_lease_shows_its_devices_and_only_them_to_children(home: Path) -> None:
    with lease(2, home=home) as both:
        assert both.environment == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    with lease(0, home=home) as none:
        assert none.environment == {"CUDA_VISIBLE_DEVICES": ""}


def test_more_devices_than_there_are_is_refused_at_once(home: Path) -> None:
    with pytest.raises(LeaseUnavailable, match="3 GPU\\(s\\) wanted, 2 here"), lease(3, home=home):
        pass


def test_the_wait_is_bounded_and_its_end_names_the_holder(home: Path) -> None:
    with lease(2, home=home, purpose="train flights"):
        with (
            pytest.raises(LeaseUnavailable, match="train flights") as caught,
            lease(1, home=home, wait_s=0.1),
        ):
            pass
        assert caught.value.retryable
        assert {holder.device for holder in holders(home)} == {"GPU-a", "GPU-b"}
    assert holders(home) == ()


def test_kill_9_frees_the_lease(home: Path) -> None:
    with holding_child(home, 2) as child:
        assert {holder.pid for holder in holders(home)} == {child.pid}
        child.send_signal(signal.SIGKILL)
        with lease(2, home=home, wait_s=10) as ours:
            assert len(ours.ids) == 2


def test_a_request_for_all_devices_is_not_starved_by_requests_for_one(home: Path) -> None:
    """The big request queues first; a small one behind it does not slip past, though one device is free."""
    order: list[str] = []
    waiting = threading.Event()

    def take(count: int, name: str, said: threading.Event) -> None:
        with lease(count, home=home, wait_s=10, say=lambda _: said.set()):
            order.append(name)

    with ExitStack() as ours:
        ours.enter_context(lease(1, home=home))
        big = threading.Thread(target=take, args=(2, "big", waiting))
        big.start()
        assert waiting.wait(5)
        small_waits = threading.Event()
        small = threading.Thread(target=take, args=(1, "small", small_waits))
        small.start()
        assert small_waits.wait(5)
        assert order == []
    deadline = time.monotonic() + 10
    for thread in (big, small):
        thread.join(deadline - time.monotonic())
    assert order == ["big", "small"]
