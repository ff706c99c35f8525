"""Nulls become the training split's median: the lower one of two, so that it is a value that occurs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.distribution import Distribution
from serin.features.filling import Fill


@dataclass(frozen=True, slots=True)
class FillMedian(Fill):
    name: ClassVar[str] = "fill_median"
    why: ClassVar[str] = "median"

    @classmethod
    def fit(cls, data: Distribution) -> Fit[Distribution]:
        (median,) = yield from data.quantiles([0.5])
        return data.after_fill(cls(median), median)
