"""The watcher's process: `python -m serin.watcher.watcher`. Records requests and watches what is live.

It needs no clean exit: supervisord restarts it after a crash, and each duty continues where it was. No request depends
on it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import partial
from pathlib import Path

from serin.host.standing import begin_beats, log_to_stdout, stop_on_signals
from serin.host.wiring import WATCHER
from serin.machine import environment
from serin.machine.heartbeat import beat
from serin.machine.in_memory import write_problems
from serin.monitoring.alerts.book import LOG, AlertBook
from serin.store.home_objects import HomeObjects
from serin.store.objects import Objects
from serin.store.open import open_objects
from serin.watcher.alerts_duty import AlertsDuty
from serin.watcher.capture_duty import CaptureDuty
from serin.watcher.cluster_watch import ClusterWatch
from serin.watcher.drift_duty import DriftDuty
from serin.watcher.duty import Commit, Duty, Rounds, nothing
from serin.watcher.history_duty import HistoryDuty, Promises
from serin.watcher.lookups_duty import LookupsDuty
from serin.watcher.metrics import MetricsServer
from serin.watcher.objectives_duty import ObjectivesDuty
from serin.watcher.quality_duty import QualityDuty
from serin.watcher.registry_duty import RegistryDuty
from serin.watcher.report_duties import ProcessesDuty, RefusalsDuty, RolloutsDuty
from serin.watcher.retrain_duty import RetrainDuty
from serin.watcher.served import has_agent
from serin.watcher.share_duty import ShareDuty

log = logging.getLogger("serin.watcher.watcher")  # not __name__, which is __main__ here

_WAITS_S = 60.0  # a duty may wait for another user of a database or a file


def duties(home: Path) -> list[Duty]:
    """Returns all duties, the recorder first: the others read what it writes. Where an agent serves, those that concern
    models are done by one watcher for all hosts."""
    shared = has_agent(home)
    alerts, promises = AlertBook(home, (LOG,) if shared else None), Promises()
    own: list[Duty] = [
        CaptureDuty(home, alerts),
        ShareDuty(home, alerts),
        HistoryDuty(home, promises),
        ProcessesDuty(home, alerts),
    ]
    if not shared:
        return [*own, *duties_of_models(home, HomeObjects(home), promises, home, alerts, nothing)]
    objects = open_objects(environment.store_url())
    for_all = ClusterWatch(home, objects, partial(duties_of_models, home, objects, promises))
    return [*own, AlertsDuty.of_host(home), for_all]


def duties_of_models(
    home: Path, objects: Objects, promises: Promises, state: Path, alerts: AlertBook, commit: Commit
) -> list[Duty]:
    """Returns the duties that are done once, however many hosts serve. `state`: the home for what they know."""
    return [
        AlertsDuty(state, home, commit),
        ObjectivesDuty(home, alerts, promises, state, commit),
        DriftDuty(home, alerts, state),
        QualityDuty(home, alerts, state=state, objects=objects, commit=commit),
        RefusalsDuty(home, alerts, state),
        RolloutsDuty(home, alerts, state),
        RetrainDuty(home, state, commit),
        RegistryDuty(home),
        LookupsDuty(home, alerts),
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
