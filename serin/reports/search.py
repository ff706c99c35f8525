"""The chart of a search: the result of each trial, the importance of each setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serin.reports.charts import Axes, Drawing, Scale


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchChart:
    """The data of the chart. `values`: the metric by complete trial. `importance`: the share of each setting; empty if
    unknown."""

    metric: str
    values: Mapping[int, float]
    best: int
    importance: Mapping[str, float]


def search_chart(chart: SearchChart) -> Drawing:
    """Draws a search. Left: every complete trial; right: the settings, the most important first."""
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
    return drawing


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
