"""Mean 0 and standard deviation 1 on the training split: (x - mean) / deviation in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from serin.features.distribution import Distribution
from serin.features.requests import FIXED_BITS, Fit, FixedPointSums, Sums
from serin.features.steps import Floats

if TYPE_CHECKING:
    from serin.features.graph import GraphBuilder


@dataclass(frozen=True, slots=True)
class Normalize:
    """Both are float32 values. A column with one value has deviation 1."""

    name: ClassVar[str] = "normalize"
    mean: float
    deviation: float

    @classmethod
    def fit(cls, data: Distribution) -> Fit[tuple[Normalize, Distribution]]:
        exponent = data.exponent()
        sums: Sums = yield FixedPointSums(data.column, data.steps, exponent)
        unit = Fraction(2) ** (exponent - FIXED_BITS)
        mean = Fraction(sums.total, sums.count)
        variance = Fraction(sums.squares, sums.count) - mean * mean
        deviation = float(np.float32(math.sqrt(float(variance * unit * unit))))
        step = cls(float(np.float32(float(mean * unit))), deviation or 1.0)
        return step, data.after(step)

    def transform(self, values: Floats) -> Floats:
        return (values - np.float32(self.mean)) / np.float32(self.deviation)

    @property
    def shape(self) -> tuple[str, ...]:
        return (self.name,)

    @classmethod
    def to_onnx(
        cls, graph: GraphBuilder, values: str, null: str | None, steps: Sequence[Normalize]
    ) -> tuple[str, str | None]:
        means = graph.constant(np.asarray([step.mean for step in steps], np.float32), "means")
        deviations = graph.constant(np.asarray([step.deviation for step in steps], np.float32), "deviations")
        return graph.op("Div", graph.op("Sub", values, means), deviations), null

    def describe(self) -> str:
        return f"minus {self.mean:g}, divided by {self.deviation:g}"

    def to_json(self) -> dict[str, Any]:
        return {"mean": self.mean, "deviation": self.deviation}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Normalize:
        return cls(float(document["mean"]), float(document["deviation"]))
