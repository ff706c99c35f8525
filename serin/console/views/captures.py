"""Recorded requests of a model: how many, how many were dropped, and what is kept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from serin.console.views.models import known_model
from serin.console.views.view import Parameters
from serin.formats.captures import captures_folder, hour_began, hours_captured, parts_of_hour
from serin.monitoring.capture.counters import CapturesView, read_captures
from serin.reports.charts import number
from serin.reports.svg import Axes, Drawing, Scale

_HOURS = 72


def read_recorded(home: Path, parameters: Parameters) -> dict[str, Any]:
    model = parameters["model"]
    state, found = known_model(home, model), read_captures(home, model)
    return {
        "model": model,
        "tab": "captures",
        "state": state,
        "captures": found,
        "dropped_share": _dropped_share(found),
        "chart": _chart(home, found) if found and found.versions else None,
    }


def _dropped_share(found: CapturesView | None) -> float | None:
    drawn = found.requests + found.dropped if found else 0
    return found.dropped / drawn if found and drawn else None


def _chart(home: Path, found: CapturesView) -> str:
    """Draws the recorded rows of each of the last hours with records."""
    rows: Counter[float] = Counter()
    for kept in found.versions:
        folder = captures_folder(home, found.model) / str(kept.version)
        for hour in hours_captured(home, found.model, kept.version)[-_HOURS:]:
            rows[hour_began(hour)] += sum(part.rows for part in parts_of_hour(folder / hour))
    last = max(rows)
    first = max(min(rows), last - (_HOURS - 1) * 3600)
    drawing = Drawing(920, 190, font=11)
    end = last + 3600
    axes = Axes(drawing, Scale(first, end, 64, 900), Scale(0.0, max(rows.values()), 156, 14))
    axes.rows(axes.y.ticks(4), number)
    hours = round((end - first) / 3600)
    step = next(each for each in (1, 2, 3, 6, 12, 24) if hours / each <= 12 or each == 24)
    ticks = [first + 3600 * place for place in range(0, hours + 1, step)]
    axes.columns(ticks, lambda t: f"{t % 86400 // 3600:02.0f}:00", lines=False)
    for t, count in rows.items():
        if t >= first:
            axes.bar((t, t + 3600), (0.0, count), "blue", gap=2)
    drawing.text(482, 186, "hour (UTC)", anchor="middle")
    return drawing.embedded(f"Recorded rows by hour: {sum(rows.values())} in {hours} hours")
