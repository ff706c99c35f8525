"""Minus the training split's median, divided by the distance between two quantiles: outliers have no say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.distribution import Distribution
from serin.features.scaling import Scaling, scale_of
from serin.spec import steps as spec


@dataclass(frozen=True, slots=True)
class RobustScale(Scaling):
    name: ClassVar[str] = "robust_scale"

    @classmethod
    def fit(cls, step: spec.RobustScale, data: Distribution) -> Fit[Distribution]:
        low, median, high = yield from data.quantiles([step.q[0], 0.5, step.q[1]])
        return data.after(cls(median, scale_of(high - low)))
