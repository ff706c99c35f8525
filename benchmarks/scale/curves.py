"""Scaling curves: what a size costs, the slope on logarithmic axes, and where a curve bends. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BEND = 0.2  # a slope so much steeper than expected is reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """`points`: what each size costs. `expected`: the steepest slope that is good: 1 is linear, 0 does not grow."""

    name: str
    what: str
    unit: str
    expected: float
    points: Mapping[int, float]

    @property
    def slope(self) -> float:
        """Returns the slope between the two largest sizes, where a fixed cost matters least."""
        return self.slopes[-1][1]

    @property
    def fitted(self) -> float:
        """Returns the slope of a straight line through all sizes."""
        sizes, costs = np.log([*self.points.items()]).T
        return float(np.polyfit(sizes, costs, 1)[0])

    @property
    def slopes(self) -> list[tuple[int, float]]:
        """Returns the slope up to each size but the first."""
        pairs = itertools.pairwise(sorted(self.points.items()))
        return [(many, math.log(more / less) / math.log(many / few)) for (few, less), (many, more) in pairs]

    @property
    def bends(self) -> list[int]:
        """Returns the sizes up to which it rises more than it should."""
        return [size for size, slope in self.slopes if slope > self.expected + BEND]

    @property
    def verdict(self) -> str:
        good = {0.0: "flat", 1.0: "linear"}.get(self.expected, f"slope at most {self.expected:g}")
        if not self.bends:
            return f"{good}, or better"
        return f"steeper than {good} up to {', '.join(f'{size:,}' for size in self.bends)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "unit": self.unit,
            "expected": self.expected,
            "points": {str(size): float(f"{value:.4g}") for size, value in self.points.items()},
            "slope": round(self.slope, 3),
            "fitted": round(self.fitted, 3),
            "verdict": self.verdict,
        }


def table(curves: Sequence[Curve]) -> list[str]:
    lines = []
    for curve in curves:
        cells = "  ".join(f"{size:,}: {value:.4g}" for size, value in sorted(curve.points.items()))
        lines += [
            f"scale, {curve.name}: {curve.what} ({curve.unit})",
            f"  {cells}",
            f"  slope {curve.slope:.2f} at the end, {curve.fitted:.2f} fitted: {curve.verdict}",
            "",
        ]
    return lines
