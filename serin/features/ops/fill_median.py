"""Nulls become the training split's median: the lower one of two, so that it is a value that occurs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from serin.features.aggregates.aggregate import Fit
from serin.features.filling import Fill, FillOperator
from serin.features.operator import Source, register


class FillMedian(FillOperator):
    """Nulls become the training split's median."""

    name = "fill_median"

    def fit(self, source: Source) -> Fit[FittedFillMedian]:
        (median,) = yield from source.distribution.quantiles([0.5])
        return FittedFillMedian(median)


@dataclass(frozen=True, slots=True)
class FittedFillMedian(Fill):
    why: ClassVar[str] = "median"


register(FillMedian, FittedFillMedian)
