"""The watcher runs each duty at its own interval, and one that fails does not stop the others."""

from __future__ import annotations

import logging

import pytest

from serin.errors import StoreUnreachable
from serin.stack.watch.duty import Rounds


class Counting:
    def __init__(self, name: str, every_s: float, *, fails: bool = False) -> None:
        self.name, self.every_s, self._fails = name, every_s, fails
        self.ticks = 0

    def tick(self, now: float) -> None:
        self.ticks += 1
        if self._fails:
            raise ValueError("a broken file")

    def close(self) -> None: ...


class Clock:
    t = 100.0

    def __call__(self) -> float:
        return self.t


def test_each_duty_runs_at_its_own_interval() -> None:
    clock, fast, slow = Clock(), Counting("fast", 1.0), Counting("slow", 10.0)
    rounds = Rounds([fast, slow], clock)
    for _ in range(20):
        assert rounds.run(0.0) == pytest.approx(1.0)
        clock.t += 1.0
    assert (fast.ticks, slow.ticks) == (20, 2)


def test_a_failing_duty_is_logged_once_a_minute_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    clock, good = Clock(), Counting("good", 1.0)
    rounds = Rounds([Counting("bad", 1.0, fails=True), good], clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(90):
            rounds.run(0.0)
            clock.t += 1.0
    assert good.ticks == 90
    assert sum("a broken file" in record.getMessage() for record in caplog.records) == 2


def test_a_duty_that_waits_for_a_store_in_vain_leaves_the_recorder_time() -> None:
    clock, recorder = Clock(), Counting("recorder", 3.0)

    class Waiting(Counting):
        def tick(self, now: float) -> None:
            self.ticks += 1
            clock.t += 40.0  # until it gives up
            raise StoreUnreachable(url="s3://somewhere", reason="no answer")

    waiting = Waiting("quality", 5.0)
    rounds = Rounds([recorder, waiting], clock)
    end = clock.t + 1000.0
    while clock.t < end:
        clock.t += max(rounds.run(0.0), 0.1)
    assert waiting.ticks == 10
    assert recorder.ticks >= 200
