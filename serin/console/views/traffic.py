"""Requests, latency, failures and error budgets of a model's releases over time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serin.console.views.models import model_tab
from serin.console.views.view import Parameters, Recent, meter
from serin.monitoring.history.read import HistoryView, SeriesHistory, read_history
from serin.monitoring.objectives.read import read_objectives
from serin.spec.roles import Access
from serin.watcher.cluster_state import watch_home

SPANS: Final = {"1h": (3600, 60), "1d": (86_400, 300), "7d": (7 * 86_400, 1800), "30d": (30 * 86_400, 7200)}
"""How far back, and how much time a point has, in seconds: about 300 points each."""
NAMES: Final = {"1h": "1 hour", "1d": "1 day", "7d": "7 days", "30d": "30 days"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseTraffic:
    """The requests of a release in one arm over the whole span."""

    release: str
    arm: str
    requests: int
    errors: int
    slow: int
    refused: int
    gone: int
    last: float


def read_traffic(home: Path, parameters: Parameters, access: Access) -> dict[str, Any]:
    del access
    model, span = parameters["model"], chosen_span(parameters)
    found = span_history(home, model, span)
    return {
        **model_tab(home, model, "traffic"),
        "span": span,
        "spans": NAMES,
        "history": found if found and found.series else None,
        "rows": [_sum(series) for series in found.series] if found else [],
        "known": found is not None,
        "objectives": _objectives(home, model),
        "newest": max((point.t for series in found.series for point in series.points), default=0)
        if found
        else 0,
    }


def _objectives(home: Path, model: str) -> dict[str, Any] | None:
    """Returns the promises with a bar of the budget that is left, and the automatic rollbacks."""
    found = read_objectives(watch_home(home, "history", "watch/objectives", "watch/rollbacks"), model)
    if found is None:
        return None
    return {
        "view": found,
        "bars": {each.name: budget_bar(each.budget_left) for each in found.objectives},
        "pairs": {  # the short and the long window of each
            each.name: list(zip(each.windows[::2], each.windows[1::2], strict=True))
            for each in found.objectives
        },
    }


def budget_bar(left: float | None) -> str:
    """Draws how much of the error budget of 30 days is left."""
    share = 1.0 if left is None else min(max(left, 0.0), 1.0)
    return meter(share, "good" if share > 0.25 else "alarm", "of the error budget is left")


def chosen_span(parameters: Parameters) -> str:
    span = parameters.get("span", "1h")
    return span if span in SPANS else "1h"


_MOST_KEPT: Final = 100
_PER_STEP: Final = 12  # a history with points of a minute is at most five seconds old
_recent = Recent[HistoryView | None](_MOST_KEPT)  # a page and its charts need the same one


def span_history(home: Path, model: str, span: str) -> HistoryView | None:
    """Returns the history of the last `span`, read again after a small part of a point's width."""
    seconds, step_s = SPANS[span]

    def read() -> HistoryView | None:
        now = time.time()
        return read_history(watch_home(home, "history"), model, now - seconds, now + step_s, step_s)

    return _recent.get((home, model, span), step_s / _PER_STEP, read)


def _sum(series: SeriesHistory) -> ReleaseTraffic:
    points = series.points
    return ReleaseTraffic(
        release=series.release,
        arm=series.arm,
        requests=sum(point.requests for point in points),
        errors=sum(point.errors for point in points),
        slow=sum(point.slow for point in points),
        refused=sum(point.refused for point in points),
        gone=sum(point.gone for point in points),
        last=max((point.t + point.width_s for point in points), default=0),
    )
