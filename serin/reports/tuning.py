"""The charts of a tuning (latency over requests/s, a line per setting, a point per number of clients) and of a search
(the result of each trial, the importance of each setting)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from serin.reports.charts import Axes, Drawing, Scale

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
    tail_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningLine:
    """The measurements of one setting."""

    role: Role
    settings: str
    points: tuple[LoadPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningChart:
    """The data of the chart. `tail`: the limited quantile, such as p99. `best`: the highest load of the chosen setting
    within `limit_ms`. `legend`: a line of text per role."""

    title: str
    limit_ms: float
    tail: str
    lines: tuple[TuningLine, ...]
    best: LoadPoint | None
    legend: Mapping[Role, str]


def tuning_chart(chart: TuningChart) -> str:
    """Returns the SVG file. Latency is logarithmic; the chosen line shows its numbers of clients and a ring around
    `best`."""
    points = [point for line in chart.lines for point in line.points]
    low = min(point.tail_ms for point in points) / 1.3
    high = max(*(point.tail_ms for point in points), chart.limit_ms) * 1.3
    drawing = Drawing(720, 460)
    axes = Axes(
        drawing,
        Scale(0.0, max(point.requests_per_s for point in points) * 1.05, 64, 700),
        Scale(low, high, 412, 112, log=True),
    )
    axes.rows(axes.y.ticks(10), lambda ms: f"{ms:g}")
    axes.columns(axes.x.ticks(), lambda per_s: f"{per_s:,g}")
    drawing.text(382, 450, "requests/s", anchor="middle")
    drawing.text(58, 104, f"{chart.tail}, ms", anchor="end")
    place = axes.limit(chart.limit_ms, "alarm")
    drawing.text(700, place - 5, f"limit: {chart.limit_ms:g} ms", colour="alarm", anchor="end", halo=True)
    for line in sorted(chart.lines, key=lambda line: list(_COLOURS).index(line.role)):
        _draw_line(axes, line, chart.tail)
    if chart.best:
        axes.dot(chart.best.requests_per_s, chart.best.tail_ms, _COLOURS["chosen"], radius=7, ring=True)
    drawing.text(64, 18, chart.title, colour="ink", bold=True)
    for row, (role, text) in enumerate(chart.legend.items()):
        drawing.rect(64, 27 + 16 * row, 10, 10, _COLOURS[role])
        drawing.text(80, 36 + 16 * row, text, colour="ink")
    return drawing.standalone()


def _draw_line(axes: Axes, line: TuningLine, tail: str) -> None:
    colour, other = _COLOURS[line.role], line.role == "other"
    places = [(point.requests_per_s, point.tail_ms) for point in line.points]
    axes.line(places, colour, width=0.8 if other else 2, title=line.settings)
    for point, (x, y) in zip(line.points, places, strict=True):
        hint = f"{point.clients} clients: {x:,.0f} requests/s, {tail} {y:.2f} ms"
        axes.dot(x, y, colour, radius=2 if other else 3, title=hint)
        if line.role == "chosen":
            axes.drawing.text(axes.x(x) + 6, axes.y(y) - 6, str(point.clients), colour=colour, halo=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchChart:
    """The data of the chart. `values`: the metric by complete trial. `importance`: the share of each setting; empty if
    unknown."""

    metric: str
    values: Mapping[int, float]
    best: int
    importance: Mapping[str, float]


def search_chart(chart: SearchChart) -> str:
    """Returns the SVG file. Left: every complete trial; right: the settings, the most important first."""
    order = sorted(chart.importance, key=lambda path: -chart.importance[path])
    drawing = Drawing(960, max(340, 80 + 26 * len(order)))
    _trials(drawing, chart)
    title = "Importance of settings" if order else "Too few trials to rank settings"
    drawing.text(520, 20, title, colour="ink", bold=True)
    share = Scale(0.0, 1.0, 690, 910)
    for index, path in enumerate(order):
        top = 36 + 26 * index
        drawing.text(682, top + 13, path, colour="ink", anchor="end")
        drawing.rect(690, top, share(chart.importance[path]) - 690, 18, "good")
        drawing.text(share(chart.importance[path]) + 6, top + 13, f"{chart.importance[path]:.0%}")
    return drawing.standalone()


def _trials(drawing: Drawing, chart: SearchChart) -> None:
    low, high = min(chart.values.values()), max(chart.values.values())
    room = 0.06 * (high - low) or abs(high) * 0.01 or 1.0
    axes = Axes(
        drawing,
        Scale(0.0, max(*chart.values, 1), 84, 470),
        Scale(low - room, high + room, drawing.height - 50, 40),
    )
    drawing.text(84, 20, f"{len(chart.values)} complete trials: {chart.metric}", colour="ink", bold=True)
    axes.rows(axes.y.ticks(), lambda value: f"{value:.6g}")
    axes.columns(
        [tick for tick in axes.x.ticks() if tick == int(tick)], lambda trial: f"{trial:g}", lines=False
    )
    drawing.text(277, drawing.height - 12, "trial", anchor="middle")
    for trial, value in chart.values.items():
        axes.dot(trial, value, "grey", radius=3.5, title=f"trial {trial}: {value:.6g}")
    best = chart.values[chart.best]
    axes.dot(chart.best, best, "good", radius=6, title=f"best: trial {chart.best}, {best:.6g}")
    drawing.dot(340, drawing.height - 16, "good", radius=6)
    drawing.text(352, drawing.height - 12, f"best: trial {chart.best}", colour="ink")
