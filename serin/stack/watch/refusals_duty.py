"""The duty that reports a model whose clients send requests that do not fit its columns."""

from __future__ import annotations

from pathlib import Path

from serin.monitoring.alerts.alert import Alerts
from serin.monitoring.drift.refusals import LOOK_S, is_over, refusal_alert, refusal_key
from serin.monitoring.history.read import read_history
from serin.rollout.run.status import status
from serin.store.artifacts import Release


class RefusalsDuty:
    """Looks at the last ten minutes of the history. It keeps no state: the book knows what is open."""

    name, every_s = "refusals", 30.0

    def __init__(self, home: Path, alerts: Alerts) -> None:
        self._home, self._alerts = home, alerts

    def tick(self, now: float) -> None:
        for model in status(self._home):
            if model.live is None:
                self._alerts.resolve(refusal_key(model.name), now)
                continue
            view = read_history(self._home, model.name, now - LOOK_S, now, arms=False)
            live = Release(model=model.name, version=model.live).name
            points = [point for each in view.series for point in each.points] if view else []
            alert = refusal_alert(model.name, live, points)
            if alert is not None:
                self._alerts.fire(alert, now)
            elif is_over(points):
                self._alerts.resolve(refusal_key(model.name), now)

    def close(self) -> None:
        pass
