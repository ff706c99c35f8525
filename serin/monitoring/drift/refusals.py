"""Requests that a release refuses because they do not fit its columns: a client may have changed its schema. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from serin.formats.reason import utc
from serin.monitoring.alerts.alert import Alert
from serin.monitoring.history.read import HistoryPoint

LOOK_S: Final = 600.0
_MANY, _FEW = 0.05, 0.01  # of the requests: reported from the one on, until it is below the other
_AT_LEAST: Final = 20  # requests: a client that is being tried out is not reported


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
