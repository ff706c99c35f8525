"""The chart of a tuning: p99 over requests/s, one line per setting, one point per number of clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from serin.reports.svg import Axes, Drawing, Scale

Role = Literal["chosen", "before", "passed over", "other"]

_COLOURS: Final[Mapping[Role, str]] = {
    "other": "grey",
    "passed over": "orange",
    "before": "blue",
    "chosen": "good",
}  # in the order of drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """The measurements of one number of clients in a closed loop."""

    clients: int
    requests_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningLine:
    """The measurements of one setting."""

    role: Role
    settings: str
    points: tuple[LoadPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningChart:
    """The data of the chart. `best`: the highest load of the chosen setting within `p99_ms`. `legend`: a line of text
    per role."""

    title: str
    p99_ms: float
    lines: tuple[TuningLine, ...]
    best: LoadPoint | None
    legend: Mapping[Role, str]


def tuning_chart(chart: TuningChart) -> str:
    """Returns the SVG file. p99 is logarithmic; the chosen line shows its numbers of clients and a ring around
    `best`."""
    points = [point for line in chart.lines for point in line.points]
    low = min(point.p99_ms for point in points) / 1.3
    high = max(*(point.p99_ms for point in points), chart.p99_ms) * 1.3
    drawing = Drawing(720, 460)
    axes = Axes(
        drawing,
        Scale(0.0, max(point.requests_per_s for point in points) * 1.05, 64, 700),
        Scale(low, high, 412, 112, log=True),
    )
    axes.rows(axes.y.ticks(10), lambda ms: f"{ms:g}")
    axes.columns(axes.x.ticks(), lambda per_s: f"{per_s:,g}")
    drawing.text(382, 450, "requests/s", anchor="middle")
    drawing.text(58, 104, "p99, ms", anchor="end")
    place = axes.limit(chart.p99_ms, "alarm")
    drawing.text(700, place - 5, f"limit: {chart.p99_ms:g} ms", colour="alarm", anchor="end", halo=True)
    for line in sorted(chart.lines, key=lambda line: list(_COLOURS).index(line.role)):
        _draw_line(axes, line)
    if chart.best:
        axes.dot(chart.best.requests_per_s, chart.best.p99_ms, _COLOURS["chosen"], radius=7, ring=True)
    drawing.text(64, 18, chart.title, colour="ink", bold=True)
    for row, (role, text) in enumerate(chart.legend.items()):
        drawing.rect(64, 27 + 16 * row, 10, 10, _COLOURS[role])
        drawing.text(80, 36 + 16 * row, text, colour="ink")
    return drawing.standalone()


def _draw_line(axes: Axes, line: TuningLine) -> None:
    colour, other = _COLOURS[line.role], line.role == "other"
    places = [(point.requests_per_s, point.p99_ms) for point in line.points]
    axes.line(places, colour, width=0.8 if other else 2, title=line.settings)
    for point, (x, y) in zip(line.points, places, strict=True):
        hint = f"{point.clients} clients: {x:,.0f} requests/s, p99 {y:.2f} ms"
        axes.dot(x, y, colour, radius=2 if other else 3, title=hint)
        if line.role == "chosen":
            axes.drawing.text(axes.x(x) + 6, axes.y(y) - 6, str(point.clients), colour=colour, halo=True)
