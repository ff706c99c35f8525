"""A real controller on fake machines, ticking in a thread, whose seconds are short."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from serin.rollout.run.controller import Controller
from serin.rollout.run.ports import EvenClock
from tests.fakes.rollout import FakeFleet, FakeJudge, FakeRouter, FakeVersions, home_inbox, home_journals
from tests.kit.threads import beside

_SPEED = 10.0


class QuickClock(EvenClock):
    """The machine's time, on which each second takes a tenth of one: no test waits for a real pause of a rollout."""

    def steady(self) -> float:
        return time.monotonic() * _SPEED


@contextmanager
def running_controller(
    home: Path, model: str, judge: FakeJudge | None = None, fleet: FakeFleet | None = None
) -> Iterator[None]:
    """Decides for versions 1 to 3 of `model`, and for editions 2 and 3 of the first one's lookups."""
    stop = threading.Event()
    decider = Controller(
        router=FakeRouter(),
        fleet=fleet or FakeFleet(),
        judge=judge or FakeJudge(step_s=0, bake_s=0),
        journals=home_journals(home),
        versions=FakeVersions(published={model: [1, "1e2", "1e3", 2, 3]}),
        commands=home_inbox(home),
        clock=QuickClock(),
    )

    def run() -> None:
        while not stop.wait(0.02):
            decider.tick()

    with closing(decider), beside(run, stop=stop):
        yield
