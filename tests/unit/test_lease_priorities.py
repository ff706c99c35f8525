"""The queue for GPUs with priorities: who goes first, who rises, and who gives way. The locks are real."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serin.errors import LeaseUnavailable
from serin.machine import leases
from serin.machine.leases import (
    RISES_AFTER_S,
    GivingWay,
    Lease,
    Priority,
    Waiter,
    asked_to_give_way,
    holders,
    lease,
    waiters,
)
from tests.fakes.gpus import pretend_gpus
from tests.kit.waiting import until


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pretend_gpus(tmp_path, monkeypatch, ["GPU-a", "GPU-b"])
    return tmp_path


def waiting_in_turn(home: Path, wanted: Sequence[tuple[str, int, Priority]]) -> list[str]:
    """Lets requests (name, count, priority) come one after another while a device is held; returns the order in which
    they were served."""
    order: list[str] = []
    threads = []

    def take(name: str, count: int, priority: Priority) -> None:
        with lease(count, home=home, purpose=name, priority=priority, wait_s=60):
            order.append(name)

    with lease(1, home=home):
        for number, request in enumerate(wanted, start=1):
            threads.append(threading.Thread(target=take, args=request))
            threads[-1].start()
            until(lambda number=number: len(waiters(home)) == number)
    for thread in threads:
        thread.join(60)
    return order


def test_urgent_requests_go_first_and_idle_ones_last(home: Path) -> None:
    wanted: list[tuple[str, int, Priority]] = [
        ("idle", 2, "idle"), ("first", 2, "normal"), ("second", 2, "normal"), ("urgent", 2, "urgent"),
    ]  # fmt: skip
    assert waiting_in_turn(home, wanted) == ["urgent", "first", "second", "idle"]


class Clock:
    """The clock of the queue, which a test sets forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(leases, "steady", clock)
    return clock


class Work:
    """A request in a thread, which holds its devices until it is ended."""

    def __init__(self, home: Path, name: str, count: int = 1, **wanted: Any) -> None:
        self.held, self.ended = threading.Event(), threading.Event()
        self.lease: Lease | None = None
        self._wanted = partial(lease, count, home=home, purpose=name, wait_s=60, **wanted)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(LeaseUnavailable), self._wanted(stop=self.ended) as self.lease:
            self.held.set()
            self.ended.wait(60)

    def way(self, home: Path) -> GivingWay:
        assert self.held.wait(30)
        assert self.lease is not None
        return GivingWay(home, self.lease, threading.Event())

    def end(self) -> None:
        self.ended.set()
        self._thread.join(30)


@contextmanager
def work(home: Path) -> Iterator[Callable[..., Work]]:
    """Starts requests, and returns when they hold their devices or, with `waits`, when they are in the queue. All end
    with the block."""
    ours: list[Work] = []

    def start(name: str, count: int = 1, *, waits: bool = False, **wanted: Any) -> Work:
        ours.append(Work(home, name, count, **wanted))
        if waits:
            until(lambda: name in [waiter.purpose for waiter in waiters(home)])
        else:
            assert ours[-1].held.wait(30)
        return ours[-1]

    try:
        yield start
    finally:
        for each in ours:
            each.ended.set()
        for each in ours:
            each.end()


def test_a_request_rises_while_it_waits(home: Path, clock: Clock) -> None:
    """After twice the time an idle request precedes every normal one, and an urgent one that came later."""
    with work(home) as start, ExitStack() as ours:
        ours.enter_context(lease(1, home=home))
        start("idle", 2, waits=True, priority="idle")
        clock.ahead_s += RISES_AFTER_S
        start("normal", 2, waits=True)
        assert [waiter.purpose for waiter in waiters(home)] == ["idle", "normal"]
        clock.ahead_s += RISES_AFTER_S
        start("urgent", 2, waits=True, priority="urgent")
        assert [waiter.purpose for waiter in waiters(home)] == ["idle", "normal", "urgent"]
        assert "idle, counts as urgent after its wait" in str(waiters(home)[0])


def test_a_clock_of_another_machine_makes_no_request_less_than_it_is() -> None:
    for waits_from, counts_as in ((1e12, "normal"), (-1e12, "urgent")):
        waiter = Waiter(
            ticket=1, waits_from=waits_from, priority="normal", count=1, shared=False, memory_bytes=0,
            pid=1, host="here", user="me", purpose="", since=0.0,
        )  # fmt: skip
        assert waiter.counts_as == counts_as


def test_an_urgent_request_gets_what_another_has_collected_so_far(home: Path) -> None:
    """The first has one of two devices and waits for the other: the urgent one must not wait for both of them."""
    order: list[str] = []

    def take(name: str, priority: Priority) -> None:
        with lease(2, home=home, purpose=name, priority=priority, wait_s=60):
            order.append(name)

    with ExitStack() as ours:
        ours.enter_context(lease(1, home=home))
        normal = threading.Thread(target=take, args=("normal", "normal"))
        normal.start()
        until(lambda: any(holder.purpose == "normal" for holder in holders(home)))
        urgent = threading.Thread(target=take, args=("urgent", "urgent"))
        urgent.start()
        until(lambda: any(holder.purpose == "urgent" for holder in holders(home)))
    for thread in (normal, urgent):
        thread.join(60)
    assert order == ["urgent", "normal"]


def idle(start: Callable[..., Work], name: str, count: int = 1, *, gives_way: bool = True) -> Work:
    return start(name, count, priority="idle", gives_way=gives_way)


def asks(home: Path, waiter: str) -> set[str]:
    """The purposes of the holders that this request asks to give way."""
    asked = {device for device, by in asked_to_give_way(home).items() if by.purpose == waiter}
    return {holder.purpose for holder in holders(home) if holder.device in asked}


def test_only_idle_holders_give_way_and_those_that_began_last(home: Path) -> None:
    with work(home) as start:
        first, second = idle(start, "first"), idle(start, "second")
        ways = [each.way(home) for each in (first, second)]
        normal = start("normal", waits=True)
        passes_of_the_queue(home)
        assert asked_to_give_way(home) == {}
        normal.ended.set()
        until(lambda: waiters(home) == ())
        start("urgent", waits=True, priority="urgent")
        until(lambda: ways[1].is_set())
        assert asks(home, "urgent") == {"second"}
        assert not ways[0].is_set()
        assert ways[1].to is not None
        assert ways[1].to.purpose == "urgent"


def passes_of_the_queue(home: Path) -> None:
    """Returns after the head of the queue has looked at the devices, twice."""
    seen: list[str] = []
    real = leases._Wanted.ask

    def ask(wanted: leases._Wanted, stack: ExitStack, waiter: Waiter) -> None:
        real(wanted, stack, waiter)
        seen.append(waiter.purpose)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases._Wanted, "ask", ask)
        until(lambda: len(seen) >= 2)


def test_a_holder_that_is_released_is_not_followed_by_a_second_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the moment between the release of a device and its collection only one has been asked."""
    with work(home) as start:
        first, second = idle(start, "first"), idle(start, "second")
        ways = [each.way(home) for each in (first, second)]
        urgent = start("urgent", waits=True, priority="urgent")
        until(lambda: ways[1].is_set())
        with monkeypatch.context() as patch:
            patch.setattr(leases._Wanted, "collect", lambda *_: False)
            second.end()
            passes_of_the_queue(home)
            assert asks(home, "urgent") == set()
        assert urgent.held.wait(30)
        assert not ways[0].is_set()


def test_a_request_asks_for_what_it_does_not_have_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(tmp_path, monkeypatch, ["GPU-a", "GPU-b", "GPU-c"])
    with work(tmp_path) as start:
        idle(start, "first")
        idle(start, "second")
        start("urgent", 2, waits=True, priority="urgent")
        until(lambda: asks(tmp_path, "urgent") == {"second"})
        passes_of_the_queue(tmp_path)
        assert asks(tmp_path, "urgent") == {"second"}


def test_a_holder_that_never_gives_way_hides_none_that_does(home: Path) -> None:
    with work(home) as start:
        idle(start, "training")
        idle(start, "a trial", gives_way=False)
        start("urgent", waits=True, priority="urgent")
        until(lambda: asks(home, "urgent") == {"training"})


def test_a_request_that_rose_to_the_top_asks_as_an_urgent_one_does(home: Path, clock: Clock) -> None:
    with work(home) as start:
        idle(start, "holder", 2)
        start("normal", waits=True)
        clock.ahead_s += RISES_AFTER_S
        start("urgent", waits=True, priority="urgent")
        until(lambda: asks(home, "normal") == {"holder"})


def test_idle_work_that_rose_to_the_top_keeps_its_devices_for_a_while(home: Path, clock: Clock) -> None:
    """Under a stream of urgent requests it gets its turn, for half an hour at least, again and again."""
    with work(home) as start:
        before = start("before", 2, priority="urgent")
        waiting = start("idle", 2, waits=True, priority="idle", gives_way=True)
        clock.ahead_s += 2 * RISES_AFTER_S
        start("stream", 2, waits=True, priority="urgent")
        before.end()
        way = waiting.way(home)
        passes_of_the_queue(home)
        assert not way.is_set()
        assert asked_to_give_way(home) == {}
        clock.ahead_s += RISES_AFTER_S
        until(lambda: way.is_set())
        assert asks(home, "stream") == {"idle"}
        start("idle again", 2, waits=True, priority="idle", gives_way=True, after=waiting.lease)
        start("later", 2, waits=True, priority="urgent")
        assert [waiter.purpose for waiter in waiters(home)] == ["stream", "idle again", "later"]


def test_who_was_told_to_stop_gives_way_to_nobody(home: Path) -> None:
    """SIGTERM sets the event, then an urgent request comes while the training saves."""
    stop = threading.Event()
    with work(home) as start:
        holder = idle(start, "idle", 2)
        assert holder.lease is not None
        way = GivingWay(home, holder.lease, stop)
        way.set()
        start("urgent", waits=True, priority="urgent")
        until(lambda: asks(home, "urgent") == {"idle"})
        assert way.wait(0)
        assert stop.is_set()
        assert way.to is None
