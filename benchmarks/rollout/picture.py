"""A picture of the benchmark's figures: `python -m benchmarks.rollout.picture FIGURES.json PICTURE.svg`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.rollout.scenarios import NULLS, WORSE

COLOURS = {"ours": "#2a8c6a", "flagger": "#b0413e", "kayenta": "#8a4fa3", "per request": "#8c7a1f"}
MARKS = {20: "v", 100: "o", 500: "^"}
MEDIAN = "p10_s, median_s, p90_s"


def draw(figures: Mapping[str, Any], path: Path) -> None:
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    FigureCanvasSVG(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    _false(left, figures)
    _sooner(right, figures)
    figure.savefig(path, metadata={"Date": None})


def _false(axes: Axes, figures: Mapping[str, Any]) -> None:
    names = [scenario.name for scenario in NULLS]
    for judge, colour in COLOURS.items():
        for rate, mark in MARKS.items():
            found = [figures.get(f"{name}, {rate}/s") for name in names]
            shares = [cell[judge]["rolled_back"] if cell else float("nan") for cell in found]
            axes.plot(shares, range(len(names)), mark, color=colour, alpha=0.8)
    axes.axvline(0.01, color="#22272e", linestyle="--", linewidth=1)
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set_xlim(-0.001, 1.2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("rolled back although no worse than allowed (line: alpha)")


def _sooner(axes: Axes, figures: Mapping[str, Any]) -> None:
    names = [scenario.name for scenario in WORSE]
    for judge, colour in COLOURS.items():
        for rate, mark in MARKS.items():
            found = [figures.get(f"{name}, {rate}/s") for name in names]
            medians = [(cell[judge][MEDIAN][1] if cell else None) or float("nan") for cell in found]
            axes.plot(
                medians,
                range(len(names)),
                mark,
                color=colour,
                alpha=0.8,
                label=judge if rate == 100 else None,
            )
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.legend(loc="lower left", frameon=False)
    axes.set_xlabel("median seconds until rolled back (▼ 20, ● 100, ▲ 500 requests/s)")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["figures"], Path(sys.argv[2]))
