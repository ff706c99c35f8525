from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serin.errors import ReleaseNotReady
from serin.rollout.run.background import BackgroundFleet
from serin.store.artifacts import Release
from tests.fakes.rollout import FakeFleet

V1 = Release(model="flights", version=1)


class SlowFleet(FakeFleet):
    """Works only while its gate is open."""

    def __init__(self) -> None:
        super().__init__(ready_after=0)
        self.gate = threading.Event()

    def start(self, release: Release) -> None:
        assert self.gate.wait(20)
        super().start(release)

    def stop(self, release: Release) -> None:
        assert self.gate.wait(20)
        super().stop(release)


@contextmanager
def background(slow: SlowFleet) -> Iterator[BackgroundFleet]:
    fleet = BackgroundFleet(slow)
    try:
        yield fleet
    finally:
        slow.gate.set()
        fleet.close()


def test_start_returns_at_once_and_is_not_repeated_in_the_meantime() -> None:
    slow = SlowFleet()
    with background(slow) as fleet:
        fleet.start(V1)
        fleet.start(V1)
        assert (fleet.state(V1), fleet.running()) == ("starting", [V1])
        slow.gate.set()
        fleet.close()
        assert (fleet.state(V1), slow.starts) == ("ready", ["flights-v1"])


def test_why_a_start_failed_is_raised_by_the_next_one() -> None:
    slow = SlowFleet()
    slow.broken.add("flights-v1")
    slow.gate.set()
    with background(slow) as fleet:
        fleet.start(V1)
        fleet.close()
        assert fleet.state(V1) == "absent"
        with pytest.raises(ReleaseNotReady, match="broken"):
            fleet.start(V1)


def test_a_release_counts_as_running_until_its_stop_is_done() -> None:
    slow = SlowFleet()
    slow.gate.set()
    slow.start(V1)
    slow.gate.clear()
    with background(slow) as fleet:
        fleet.stop(V1)
        assert fleet.running() == [V1]
        slow.gate.set()
        fleet.close()
        assert (fleet.running(), fleet.state(V1)) == ([], "absent")
