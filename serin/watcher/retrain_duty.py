"""The duty that asks for a retraining again while an alarm stays open and the budget allows another one.

The first request is the event of the alert itself. It may have been refused, have failed, or have found that the tables
have no new rows yet.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serin.errors import NotFound, SerinError
from serin.host.state import Stack, read_stack
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.alerts.read import read_alerts
from serin.monitoring.retrain import RetrainBook, ask_again_at, read_retraining
from serin.prefect import rest_api
from serin.prefect.login import stack_api
from serin.rollout.run.status import status
from serin.spec.load import load_spec
from serin.spec.monitoring import MonitoringSpec
from serin.store.artifacts import Release
from serin.store.store import Store

log = logging.getLogger(__name__)

_RANKS = {"page": 2, "ticket": 1, "info": 0}


class RetrainDuty:
    """Sends `serin.drift` or `serin.quality` again, with the most important open alarm as the reason."""

    name, every_s = "retraining", 30.0

    def __init__(self, home: Path) -> None:
        self._home = home
        self._requests: dict[str, EventRequest] = {}
        self._specs: dict[Release, MonitoringSpec | None] = {}

    def tick(self, now: float) -> None:
        for model in status(self._home):
            if self._is_answered(model.name) and model.live is not None and not model.rollout.running:
                self._look(Release(model=model.name, version=model.live), now)

    def close(self) -> None:
        """Nobody waits for requests: what was not sent is sent by the next watcher."""

    def _is_answered(self, model: str) -> bool:
        """Whether no request of the model is on its way."""
        request = self._requests.get(model)
        if request is None:
            return True
        if not request.over:
            return False
        del self._requests[model]
        if request.problem is None:
            RetrainBook(self._home, model).note_asked_again(request.t)
        else:
            log.warning("the event about %s is sent again later: %s", model, request.problem)
        return True

    def _look(self, live: Release, now: float) -> None:
        spec, stack = self._spec(live), read_stack(self._home)
        if spec is None or not spec.retrain or stack is None or not stack.prefect_api_url:
            return
        at = ask_again_at(read_retraining(self._home, live.model), spec)
        if at is None or at > now:
            return
        alarms = [
            each.alert
            for each in read_alerts(self._home, live.model, resolved=0).open
            if each.alert.kind in spec.retrain and each.alert.release == live.name
        ]
        if alarms:
            first = max(alarms, key=_priority)
            log.info("%s: an alarm stays; a retraining is requested again: %s", live.model, first.title)
            self._requests[live.model] = EventRequest(
                stack, f"serin.{first.kind}", model=live.model, payload=_payload(first, now), now=now
            )

    def _spec(self, live: Release) -> MonitoringSpec | None:
        """What the version's spec says; read once. None: it is not in the store, or has no spec."""
        if live not in self._specs:
            try:
                file = Path(Store.open().bundle(live.model, live.version).path) / "spec.yaml"
            except NotFound:
                return None
            self._specs[live] = load_spec(file).monitoring if file.is_file() else None
        return self._specs[live]


def _priority(alert: Alert) -> tuple[int, float]:
    return _RANKS[alert.severity], float(alert.facts.get("importance_share") or 0.0)


def _payload(alert: Alert, now: float) -> dict[str, Any]:
    return {
        "title": alert.title,
        "text": alert.text,
        "since": alert.since,
        "noticed": now,
        "release": alert.release,
        "facts": dict(alert.facts),
    }


class EventRequest:
    """Begins at once. `over`: the server has answered or could not be asked; `problem` is None when it accepted."""

    def __init__(
        self, stack: Stack, name: str, *, model: str, payload: Mapping[str, Any], now: float
    ) -> None:
        self.t = now
        self._event = {
            "id": str(uuid.uuid4()),
            "occurred": datetime.fromtimestamp(now, UTC).isoformat(),
            "event": name,
            "resource": {
                "prefect.resource.id": f"serin.model.{model}",
                "prefect.resource.name": model,
                "serin.model": model,
            },
            "payload": dict(payload),
        }
        self.problem: str | None = None
        self._stack = stack
        self._thread = threading.Thread(target=self._send, name=f"event about {model}", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _send(self) -> None:
        try:
            rest_api.call(stack_api(self._stack), "POST", "/events", [self._event])
        except (SerinError, OSError, ValueError) as error:
            self.problem = str(error)
