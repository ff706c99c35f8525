"""Mean 0 and standard deviation 1 on the training split: (x - mean) / deviation in float32."""

from __future__ import annotations

from dataclasses import dataclass

from serin.columns.rounding import nearest_ratio, nearest_root
from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.exact_sums import SUM_EXPONENT, ExactSums, Sums
from serin.features.operator import NumberOperator, Source, register
from serin.features.scaling import Scaling, scale_of


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


register(Normalize, FittedNormalize)
