"""The watcher's process: `python -m serin.watcher.watcher`. Records requests and watches what is live.

It needs no clean exit: supervisord restarts it after a crash, and each duty continues where it was. No request depends
on it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from serin.errors import StoreUnreachable
from serin.host.standing import begin_beats, log_to_stdout, stop_on_signals
from serin.host.wiring import WATCHER
from serin.machine import environment
from serin.machine.heartbeat import beat
from serin.machine.in_memory import write_problems
from serin.monitoring.alerts.book import AlertBook
from serin.watcher.alerts_duty import AlertsDuty
from serin.watcher.capture_duty import CaptureDuty
from serin.watcher.cost_duty import CostDuty
from serin.watcher.drift_duty import DriftDuty
from serin.watcher.duty import Duty
from serin.watcher.history_duty import HistoryDuty, Promises
from serin.watcher.metrics import MetricsServer
from serin.watcher.objectives_duty import ObjectivesDuty
from serin.watcher.quality_duty import QualityDuty
from serin.watcher.report_duties import ProcessesDuty, RefusalsDuty, RolloutsDuty
from serin.watcher.retrain_duty import RetrainDuty
from serin.watcher.share_duty import ShareDuty

log = logging.getLogger("serin.watcher.watcher")  # not __name__, which is __main__ here

_REPEAT_S = 60.0  # the same error is logged once in this time
# Until a duty waits for the store again after having waited in vain: the recorder waits with it.
_AWAY_S = 60.0


class Rounds:
    """Calls each duty when it is due."""

    def __init__(self, duties: Sequence[Duty], clock: Callable[[], float] = time.monotonic) -> None:
        self._duties, self._clock = tuple(duties), clock
        self._due = dict.fromkeys(range(len(self._duties)), 0.0)
        self._logged: dict[tuple[str, str], float] = {}
        self.failing: dict[str, str] = {}
        """By duty: why its last tick failed."""

    def run(self, now: float) -> float:
        """Runs every duty that is due and returns the seconds until the next one is."""
        for place, duty in enumerate(self._duties):
            began = self._clock()
            if began < self._due[place]:
                continue
            self._due[place] = began + duty.every_s
            beat()
            try:
                duty.tick(now)
                self.failing.pop(f"the watcher's {duty.name}", None)
            except Exception as error:  # noqa: BLE001 (one duty's bug must not stop the recorder)
                self._report(duty.name, error)
                self.failing[f"the watcher's {duty.name}"] = str(error)
                if isinstance(error, StoreUnreachable):
                    self._due[place] = self._clock() + max(_AWAY_S, duty.every_s)
        return max(0.0, min(self._due.values(), default=self._clock() + 1.0) - self._clock())

    def close(self) -> None:
        for duty in self._duties:
            try:
                duty.close()
            except Exception as error:  # noqa: BLE001
                self._report(duty.name, error)

    def _report(self, name: str, error: Exception) -> None:
        key = name, f"{type(error).__name__}: {error}"
        if self._clock() - self._logged.get(key, -_REPEAT_S) >= _REPEAT_S:
            self._logged[key] = self._clock()
            log.warning("%s failed and will be tried again: %s", name, key[1], exc_info=error)


_WAITS_S = 60.0  # a duty may wait for another user of a database or a file


def duties(home: Path) -> list[Duty]:
    """Returns all duties, the recorder first: the others read what it writes."""
    alerts, promises = AlertBook(home), Promises()
    return [
        CaptureDuty(home, alerts),
        ShareDuty(home, alerts),
        AlertsDuty(home),
        HistoryDuty(home, promises),
        ObjectivesDuty(home, alerts, promises),
        DriftDuty(home, alerts),
        QualityDuty(home, alerts),
        RefusalsDuty(home, alerts),
        RolloutsDuty(home, alerts),
        ProcessesDuty(home, alerts),
        RetrainDuty(home),
        CostDuty(home),
    ]


def run(home: Path, stop: threading.Event) -> None:
    """Runs the duties until `stop` is set."""
    rounds = Rounds(duties(home))
    metrics = MetricsServer.start(home)
    log.info("the watcher has started")
    told: dict[str, str] | None = None
    try:
        while not stop.is_set():
            pause_s = rounds.run(time.time())
            if rounds.failing != told:
                with contextlib.suppress(OSError):
                    write_problems(home, WATCHER, rounds.failing)
                    told = dict(rounds.failing)
            beat(within_s=pause_s)
            stop.wait(pause_s)
    finally:
        rounds.close()
        if metrics:
            metrics.close()
    log.info("the watcher has stopped")


def main() -> None:
    log_to_stdout()
    stop = stop_on_signals()
    begin_beats(environment.home(), waits_s=_WAITS_S, asks_store=True)
    run(environment.home(), stop)


if __name__ == "__main__":
    main()
