"""The duty that asks for a retraining again while an alarm stays open and the budget allows another one.

The first request is the event of the alert itself. It may have been refused, have failed, or have found that the tables
have no new rows yet.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from serin.errors import NotFound
from serin.monitoring.alerts.alert import AlertRecord
from serin.monitoring.alerts.book import PREFECT, read_alerts
from serin.monitoring.alerts.delivery import Attempt
from serin.monitoring.alerts.outbox import Message
from serin.monitoring.retrain import RetrainBook, ask_again_at, read_retraining
from serin.prefect.login import find_server
from serin.spec.monitoring import MonitoringSpec
from serin.store.artifacts import Release
from serin.store.packages import stored_spec
from serin.store.store import Store
from serin.watcher.alerts_duty import PrefectChannel
from serin.watcher.duty import Commit, Duty, nothing
from serin.watcher.served import watched_statuses

log = logging.getLogger(__name__)

_RANKS = {"page": 2, "ticket": 1, "info": 0}
_TIMEOUT_S: Final = 120.0


class RetrainDuty(Duty):
    """Sends `serin.drift` or `serin.quality` again, with the most important open alarm as the reason. What was not sent
    when the watcher ends is sent by the next one."""

    name, every_s = "retraining", 30.0

    def __init__(self, home: Path, state: Path | None = None, commit: Commit = nothing) -> None:
        """`state`: the home with the alerts; None: `home`. `commit`: called before an event is sent."""
        self._home, self._state, self._commit = home, state or home, commit
        self._requests: dict[str, Attempt] = {}
        self._specs: dict[Release, MonitoringSpec | None] = {}

    def tick(self, now: float) -> None:
        for model in watched_statuses(self._home):
            if self._is_answered(model.name) and model.live_release and not model.rollout.running:
                self._look(model.live_release, now)

    def _is_answered(self, model: str) -> bool:
        """Whether no request of the model is on its way."""
        request = self._requests.get(model)
        if request is None:
            return True
        if not request.over:
            return False
        del self._requests[model]
        if request.problem is None:
            RetrainBook(self._state, model).note_asked_again(request.message.record.fired)
        else:
            log.warning("the event about %s is sent again later: %s", model, request.problem)
        return True

    def _look(self, live: Release, now: float) -> None:
        spec = self._spec(live)
        if spec is None or not spec.retrain or find_server(self._home) is None:
            return
        at = ask_again_at(read_retraining(self._state, live.model), spec)
        if at is None or at > now:
            return
        alarms = [
            each
            for each in read_alerts(self._state, live.model, resolved=0).open
            if each.alert.kind in spec.retrain and each.alert.release == live.name
        ]
        if alarms:
            first = max(alarms, key=_priority)
            log.info("%s: an alarm stays; a retraining is requested again: %s", live.model, first.alert.title)
            again = Message(
                number=int(now), receiver=PREFECT, event="fired", record=replace(first, fired=now)
            )
            self._commit()
            self._requests[live.model] = Attempt(again, PrefectChannel(self._home), timeout_s=_TIMEOUT_S)

    def _spec(self, live: Release) -> MonitoringSpec | None:
        """What the version's spec says; read once. None: it is not in the store, or has no spec."""
        if live not in self._specs:
            try:
                bundle = Path(Store.open().bundle(live.model, live.label).path)
            except NotFound:
                return None
            self._specs[live] = stored_spec(bundle).monitoring if (bundle / "spec.yaml").is_file() else None
        return self._specs[live]


def _priority(record: AlertRecord) -> tuple[int, float]:
    alert = record.alert
    return _RANKS[alert.severity], float(alert.facts.get("importance_share") or 0.0)
