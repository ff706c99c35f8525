"""0 for the training split's smallest value, 1 for its largest. Later values may lie outside: clip first or after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.distribution import Distribution
from serin.features.scaling import Scaling, scale_of


@dataclass(frozen=True, slots=True)
class MinMax(Scaling):
    name: ClassVar[str] = "min_max"

    @classmethod
    def fit(cls, data: Distribution) -> Fit[Distribution]:
        low, high = yield from data.quantiles([0.0, 1.0])
        return data.after(cls(low, scale_of(high - low)))
