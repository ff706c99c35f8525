"""Draws each scaling curve of the results: the measured sizes on logarithmic axes, beside the slope that is good.

python -m benchmarks.suite.curves_picture RESULTS.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.suite.picture import MET, MISSED


def draw_curves(document: Mapping[str, Any], results: Path) -> list[Path]:
    """Writes one picture for each curve beside the results, and returns their paths."""
    curves = {name: curve for part in document["parts"] for name, curve in part.get("curves", {}).items()}
    paths = []
    for name, curve in curves.items():
        path = results.with_name(f"{results.stem}-curve-{name.replace('_', '-')}.svg")
        _draw(curve, path)
        paths.append(path)
    return paths


def _draw(curve: Mapping[str, Any], path: Path) -> None:
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    sizes = sorted(map(int, curve["points"]))
    costs = [curve["points"][str(size)] for size in sizes]
    good = [costs[-1] * (size / sizes[-1]) ** curve["expected"] for size in sizes]
    words = {0: "flat", 1: "linear"}.get(curve["expected"], f"slope {curve['expected']:g}")
    axes.plot(sizes, good, "--", color="#8c959f", linewidth=1, label=words)
    bends = "steeper" in curve["verdict"]
    axes.plot(
        sizes, costs, "o-", color=MISSED if bends else MET, label=f"measured, slope {curve['slope']:.2f}"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(curve["what"], fontsize=9)
    axes.set_ylabel(curve["unit"])
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    given = Path(sys.argv[1])
    draw_curves(json.loads(given.read_text(encoding="utf-8")), given)
