"""The duty that reports a model whose clients send requests that do not fit its columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from serin.formats.reason import utc
from serin.monitoring.alerts.alert import Alert, Alerts
from serin.monitoring.history.read import HistoryPoint, read_history
from serin.rollout.run.status import status
from serin.store.artifacts import Release
from serin.watcher.duty import Duty

LOOK_S: Final = 600.0
_MANY, _FEW = 0.05, 0.01  # of the requests: reported from the one on, until it is below the other
_AT_LEAST: Final = 20  # requests: a client that is being tried out is not reported


class RefusalsDuty(Duty):
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


def refusal_key(model: str) -> str:
    return f"{model}/data/refused"


def is_over(points: Sequence[HistoryPoint]) -> bool:
    """Whether requests are accepted again. Without requests nothing is known."""
    requests, refused = _sums(points)
    return requests > 0 and refused < _FEW * requests


def refusal_alert(model: str, release: str, points: Sequence[HistoryPoint]) -> Alert | None:
    """The alert about the requests of the last ten minutes; None when too few of them were refused."""
    requests, refused = _sums(points)
    if refused < _AT_LEAST or refused < _MANY * requests:
        return None
    since = min(point.t for point in points if point.refused)
    share = refused / requests
    return Alert(
        key=refusal_key(model),
        kind="data",
        model=model,
        release=release,
        severity="ticket",
        title=f"{share:.0%} of the requests are refused",
        text=(
            f"{refused:,} of {requests:,} requests within ten minutes did not fit the request columns of {release}, "
            f"the first at {utc(since)}. Has a client changed its schema? Each answer names what does not fit. `serin "
            f"models show {model}` lists the columns, `serin logs {model}` the refused requests with their ids."
        ),
        since=float(since),
        facts={"requests": requests, "refused": refused, "share": share},
    )


def _sums(points: Sequence[HistoryPoint]) -> tuple[int, int]:
    return sum(point.requests for point in points), sum(point.refused for point in points)
