"""Requests, latency, failures and error budgets of a model's releases over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serin.console.views.models import known_model
from serin.console.views.rollouts import stretched
from serin.console.views.view import Parameters
from serin.monitoring.history.read import HistoryView, SeriesHistory, read_history
from serin.monitoring.objectives.read import WindowBurn, read_objectives
from serin.reports.svg import Drawing

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


def read_traffic(home: Path, parameters: Parameters) -> dict[str, Any]:
    model, span = parameters["model"], chosen_span(parameters)
    state, found = known_model(home, model), span_history(home, model, span)
    return {
        "model": model,
        "tab": "traffic",
        "state": state,
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
    found = read_objectives(home, model)
    if found is None:
        return None
    return {
        "view": found,
        "bars": {each.name: budget_bar(each.budget_left) for each in found.objectives},
        "pairs": {each.name: list(batched_pairs(each.windows)) for each in found.objectives},
    }


def batched_pairs(windows: Sequence[WindowBurn]) -> Iterator[tuple[WindowBurn, WindowBurn]]:
    """Yields the short and the long window of each pair."""
    return zip(windows[::2], windows[1::2], strict=True)


def budget_bar(left: float | None) -> str:
    """Draws how much of the error budget of 30 days is left."""
    share = 1.0 if left is None else min(max(left, 0.0), 1.0)
    drawing = Drawing(160, 10)
    drawing.rect(0, 2, 160, 6, "soft")
    drawing.rect(0, 2, 160 * share, 6, "good" if share > 0.25 else "alarm")
    return stretched(drawing, f"{share:.0%} of the error budget is left")


def chosen_span(parameters: Parameters) -> str:
    span = parameters.get("span", "1h")
    return span if span in SPANS else "1h"


class _Recent:
    """Histories that were read a moment ago: a page and its charts need the same one. One thread reads, others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[
            tuple[Path, str, str], tuple[threading.Lock, list[tuple[float, HistoryView | None]]]
        ] = {}

    def read(self, home: Path, model: str, span: str) -> HistoryView | None:
        seconds, step_s = SPANS[span]
        with self._lock:
            if len(self._found) > _MOST_KEPT:
                self._found.clear()
            lock, kept = self._found.setdefault((home, model, span), (threading.Lock(), []))
        with lock:
            now = time.time()
            if not kept or not 0 <= now - kept[0][0] < step_s / _PER_STEP:
                kept[:] = [(now, read_history(home, model, now - seconds, now + step_s, step_s))]
            return kept[0][1]


_MOST_KEPT: Final = 100
_PER_STEP: Final = 12  # a history with points of a minute is at most five seconds old
_recent = _Recent()


def span_history(home: Path, model: str, span: str) -> HistoryView | None:
    """Returns the history of the last `span`, read again after a small part of a point's width."""
    return _recent.read(home, model, span)


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
