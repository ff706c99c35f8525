"""Draws the benchmark's figures and prints them as Markdown tables.

python -m benchmarks.rollout.picture FIGURES.json PICTURE.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
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


def tables(figures: Mapping[str, Any]) -> str:
    """Returns tables with one row per scenario and the rates side by side, as in the picture."""
    heads = "| ours | Flagger's loop | Kayenta's judge | a bet per request |"
    kinds = (("no worse than allowed", NULLS, _share), ("worse", WORSE, _median))
    return "\n\n".join(
        "\n".join(
            [
                f"| {title} {heads}",
                "|---" * 5 + "|",
                *(_row(figures, scenario.name, show) for scenario in scenarios),
            ]
        )
        for title, scenarios, show in kinds
    )


def _row(figures: Mapping[str, Any], name: str, show: Callable[[Mapping[str, Any]], str]) -> str:
    found = [cell for rate in MARKS if (cell := figures.get(f"{name}, {rate}/s"))]
    cells = (" / ".join(show(cell[judge]) for cell in found) for judge in COLOURS)
    return f"| {name} | {' | '.join(cells)} |"


def _share(judged: Mapping[str, Any]) -> str:
    share = judged["rolled_back"]
    return "1" if share == 1 else f"{share:.4f}".lstrip("0")


def _median(judged: Mapping[str, Any]) -> str:
    median = judged[MEDIAN][1]
    return "never" if median is None else f"{median:.0f}"


if __name__ == "__main__":
    shown = json.loads(Path(sys.argv[1]).read_text())["figures"]
    draw(shown, Path(sys.argv[2]))
    print(tables(shown))
