"""The watcher's process: `python -m serin.stack.watch.watcher`. Records requests and watches what is live.

It needs no clean exit: supervisord restarts it after a crash, and each duty continues where it was. No request depends
on it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

from serin.machine import environment
from serin.machine.heartbeat import beat
from serin.machine.in_memory import write_problems
from serin.monitoring.alerts.book import AlertBook
from serin.stack.host.standing import begin_beats, log_to_stdout, stop_on_signals
from serin.stack.watch.alerts_duty import AlertsDuty
from serin.stack.watch.capture_duty import CaptureDuty
from serin.stack.watch.cost_duty import CostDuty
from serin.stack.watch.drift_duty import DriftDuty
from serin.stack.watch.duty import Duty, Rounds
from serin.stack.watch.history_duty import HistoryDuty
from serin.stack.watch.metrics.server import MetricsServer
from serin.stack.watch.objectives_duty import ObjectivesDuty
from serin.stack.watch.processes_duty import ProcessesDuty
from serin.stack.watch.promises import Promises
from serin.stack.watch.quality_duty import QualityDuty
from serin.stack.watch.refusals_duty import RefusalsDuty
from serin.stack.watch.retrain_duty import RetrainDuty
from serin.stack.watch.rollouts_duty import RolloutsDuty
from serin.stack.watch.share_duty import ShareDuty
from serin.stack.wiring import WATCHER

log = logging.getLogger("serin.stack.watch.watcher")  # not __name__, which is __main__ here


_WAITS_S = 60.0  # a duty may wait for another user of a database or a file


def duties(home: Path) -> list[Duty]:
    """Returns all duties, the recorder first: the others read what it writes."""
    alerts, promises = AlertBook(home), Promises(home)
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
