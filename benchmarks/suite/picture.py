"""Draws the figures of a suite against their goals: one dot each, right of the line where the goal is met.

python -m benchmarks.suite.picture RESULTS.json PICTURE.svg
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.suite.goals import GOALS
from benchmarks.suite.parts import Goal

MET, MISSED = "#2a8c6a", "#b0413e"
_FARTHEST = 32.0  # times its goal; beyond it a dot is drawn at the edge


def draw(document: Mapping[str, Any], path: Path) -> None:
    found = list(judged_figures(document))
    figure = Figure(figsize=(9, 1.2 + 0.24 * len(found)), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for place, (_, value, goal) in enumerate(found):
        times = min(_FARTHEST, max(1 / _FARTHEST, times_the_goal(value, goal)))
        axes.plot([1, times], [place, place], color="#d0d7de", linewidth=1, zorder=1)
        axes.plot([times], [place], "o", color=MET if goal.is_met(value) else MISSED, zorder=2)
    axes.axvline(1.0, color="#22272e", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yticks(range(len(found)), [f"{name}  {value:.3g} (goal {goal})" for name, value, goal in found])
    axes.invert_yaxis()
    axes.set_xlabel("how many times its goal a figure reaches (right of the line: met)")
    figure.savefig(path, metadata={"Date": None})


def judged_figures(document: Mapping[str, Any]) -> Iterator[tuple[str, float, Goal]]:
    """Yields all figures that have a goal, in the order of the goals."""
    figures = {part["name"]: part["figures"] for part in document["parts"]}
    for benchmark, goals in GOALS.items():
        for name, goal in goals.items():
            value = figures.get(benchmark, {}).get(name)
            if value is not None and math.isfinite(value):
                yield f"{benchmark} {name}", value, goal


def times_the_goal(value: float, goal: Goal) -> float:
    """Returns 1 at the goal and more beyond it: of a figure that should be small, the goal over the figure."""
    if goal.least is not None:
        return max(value, 0.0) / goal.least
    assert goal.most is not None
    return goal.most / value if value > 0 else _FARTHEST


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
