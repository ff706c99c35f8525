"""Draws the first day of the simulation: its requests, and the replicas of each fleet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.elastic.day import TICK_S

COLOURS = {"fixed": "#8c7a1f", "serin": "#2a8c6a", "in flight alone": "#b0413e", "cpu 80%": "#8a4fa3"}


def draw(asked: Any, found: Mapping[str, Any], path: Path) -> None:
    """`asked`: the requests of each tick. `found`: by fleet, with its replicas in each minute."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasSVG(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.8))
    minutes = asked.reshape(-1, int(60 / TICK_S)).sum(axis=1) / 60
    hours = np.arange(len(minutes)) / 60
    top.plot(hours, minutes, color="#22272e", linewidth=0.8)
    top.set_ylabel("requests/s")
    for name, colour in COLOURS.items():
        bottom.step(hours, found[name]["replicas"], color=colour, label=name, linewidth=1.2, where="post")
    bottom.set_ylabel("replicas")
    bottom.set_xlabel("hour of the day")
    bottom.legend(frameon=False, loc="upper left")
    figure.savefig(path, metadata={"Date": None})
