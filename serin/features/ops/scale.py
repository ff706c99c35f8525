"""(x - shift) / scale in float32. The scalings differ in where the two numbers come from: the ends of the training
split's values, their mean and standard deviation, or their quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import model_validator

from serin.columns.exact import nearest_ratio, nearest_root
from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.exact_sums import SUM_EXPONENT, ExactSums, Sums
from serin.features.fitted import FittedNumbers, Floats
from serin.features.operator import NumberOperator, Source, register, rising

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


class MinMax(NumberOperator):
    """0 for the training split's smallest value, 1 for its largest. Later values may be outside: clip them."""

    name = "min_max"

    def fit(self, source: Source) -> Fit[FittedMinMax]:
        low, high = yield from source.distribution.quantiles([0.0, 1.0])
        return FittedMinMax(low, scale_of(high - low))


@dataclass(frozen=True, slots=True)
class FittedMinMax(Scaling):
    """Shift is the smallest value, scale the distance to the largest."""


class Normalize(NumberOperator):
    """Mean 0 and standard deviation 1 on the training split. A null stays null: fill it first."""

    name = "normalize"

    def fit(self, source: Source) -> Fit[FittedNormalize]:
        sums: Sums = yield ExactSums(source.distribution.numbers)
        if sums.count == 0:  # all results of the steps are infinite
            return FittedNormalize(0.0, 1.0)
        mean = nearest_ratio(sums.total, sums.count, SUM_EXPONENT)
        spread = sums.squares * sums.count - sums.total**2
        deviation = nearest_root(spread, sums.count**2, SUM_EXPONENT)
        return FittedNormalize(mean, scale_of(deviation))


@dataclass(frozen=True, slots=True)
class FittedNormalize(Scaling):
    """Shift is the mean, scale the standard deviation. A column with one value has deviation 1."""


class RobustScale(NumberOperator):
    """Subtract the median and divide by the distance between two quantiles of the training split."""

    name = "robust_scale"
    q: tuple[float, float] = (0.25, 0.75)
    """The two quantiles whose distance is the unit."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        rising(self.q, "[0.25, 0.75]")
        return self

    def fit(self, source: Source) -> Fit[FittedRobustScale]:
        low, median, high = yield from source.distribution.quantiles([self.q[0], 0.5, self.q[1]])
        return FittedRobustScale(median, scale_of(high - low))


@dataclass(frozen=True, slots=True)
class FittedRobustScale(Scaling):
    """Shift is the median, scale the distance between the quantiles."""


register(MinMax, FittedMinMax)
register(Normalize, FittedNormalize)
register(RobustScale, FittedRobustScale)
