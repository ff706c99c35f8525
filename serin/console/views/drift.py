"""The drift watch of a model: each column with both distributions and how close it is to an alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serin.console.views.models import known_model
from serin.console.views.rollouts import stretched
from serin.console.views.view import Parameters
from serin.monitoring.drift.read import read_drift
from serin.reports.drift_page import column_drawing
from serin.reports.drift_view import ColumnView
from serin.reports.svg import Drawing


def read_drift_watch(home: Path, parameters: Parameters) -> dict[str, Any]:
    model = parameters["model"]
    state, found = known_model(home, model), read_drift(home, model)
    columns = found.columns if found else ()
    return {
        "model": model,
        "tab": "drift",
        "state": state,
        "drift": found,
        "charts": {each.name: _distributions(each) for each in columns},
        "meters": {each.name: _meter(each) for each in columns},
    }


def _distributions(column: ColumnView) -> str:
    title = f"{column.name}, training and live rows of the last day"
    if (worst := column.largest) is not None:
        title += f". Most different: {worst.label}, {worst.then:.1%} in training, {worst.now:.1%} now"
    return column_drawing(column).embedded(title)


def _meter(column: ColumnView) -> str:
    drawing, share = Drawing(160, 10), min(max(column.evidence, 0.0), 1.0)
    drawing.rect(0, 2, 160, 6, "soft")
    drawing.rect(0, 2, 160 * share, 6, "alarm" if share >= 1 else "line")
    return stretched(drawing, f"{share:.0%} of the evidence that an alarm needs")
