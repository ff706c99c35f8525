"""Mean 0 and standard deviation 1 on the training split: (x - mean) / deviation in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from serin.columns.rounding import nearest_ratio, nearest_root
from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.distribution import Distribution
from serin.features.aggregates.exact_sums import SUM_EXPONENT, ExactSums, Sums
from serin.features.scaling import Scaling, scale_of


@dataclass(frozen=True, slots=True)
class Normalize(Scaling):
    """Shift is the mean, scale the standard deviation. A column with one value has deviation 1."""

    name: ClassVar[str] = "normalize"

    @classmethod
    def fit(cls, data: Distribution) -> Fit[Distribution]:
        sums: Sums = yield ExactSums(data.numbers)
        if sums.count == 0:  # what the steps made is infinite throughout
            return data.after(cls(0.0, 1.0))
        mean = nearest_ratio(sums.total, sums.count, SUM_EXPONENT)
        spread = sums.squares * sums.count - sums.total**2
        deviation = nearest_root(spread, sums.count**2, SUM_EXPONENT)
        return data.after(cls(mean, scale_of(deviation)))
