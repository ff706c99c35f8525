"""Minus the training split's median, divided by the distance between two quantiles: outliers have no influence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pydantic import model_validator

from serin.features.aggregates.aggregate import Fit
from serin.features.operator import NumberOperator, Source, register, rising
from serin.features.scaling import Scaling, scale_of


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


register(RobustScale, FittedRobustScale)
