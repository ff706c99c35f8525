"""0 for the training split's smallest value, 1 for its largest. Later values may be outside: clip before or after."""

from __future__ import annotations

from dataclasses import dataclass

from serin.features.aggregates.aggregate import Fit
from serin.features.operator import NumberOperator, Source, register
from serin.features.scaling import Scaling, scale_of


class MinMax(NumberOperator):
    """0 for the training split's smallest value, 1 for its largest."""

    name = "min_max"

    def fit(self, source: Source) -> Fit[FittedMinMax]:
        low, high = yield from source.distribution.quantiles([0.0, 1.0])
        return FittedMinMax(low, scale_of(high - low))


@dataclass(frozen=True, slots=True)
class FittedMinMax(Scaling):
    """Shift is the smallest value, scale the distance to the largest."""


register(MinMax, FittedMinMax)
