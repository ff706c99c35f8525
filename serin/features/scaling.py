"""The common part of all scalings: (x - shift) / scale in float32. They differ in where the two numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from serin.features.fitted import FittedNumbers, Floats

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


@dataclass(frozen=True, slots=True)
class Scaling(FittedNumbers):
    """Both are float32 values; `scale` is positive and finite."""

    shift: float
    scale: float

    def transform(self, values: Floats) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            return (values - np.float32(self.shift)) / np.float32(self.scale)

    @property
    def shape(self) -> tuple[str, ...]:
        return ("scale",)

    @classmethod
    def to_onnx(
        cls, graph: GraphBuilder, values: str, null: str | None, steps: Sequence[Scaling]
    ) -> tuple[str, str | None]:
        shifts = graph.constant(np.asarray([step.shift for step in steps], np.float32), "shifts")
        scales = graph.constant(np.asarray([step.scale for step in steps], np.float32), "scales")
        return graph.op("Div", graph.op("Sub", values, shifts), scales), null

    def describe(self) -> str:
        return f"minus {self.shift:g}, divided by {self.scale:g}"


def scale_of(width: float) -> float:
    """Returns a divisor for values that far apart: 1 when they do not differ, and never more than float32 can
    represent."""
    with np.errstate(over="ignore"):
        scale = float(np.float32(width))
    return min(scale, float(np.finfo(np.float32).max)) or 1.0
