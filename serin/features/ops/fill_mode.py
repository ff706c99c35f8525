"""Nulls become the training split's commonest value; of several, the smallest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.number_counts import NumberCounts
from serin.features.aggregates.value_counts import ValueTable
from serin.features.filling import Fill, FillOperator
from serin.features.operator import Source, register


class FillMode(FillOperator):
    """Nulls become the most common value of the training split."""

    name = "fill_mode"

    def fit(self, source: Source) -> Fit[FittedFillMode]:
        table: ValueTable = yield NumberCounts(source.distribution.numbers)
        if len(table.values) == 0:  # all results of the steps are infinite
            return FittedFillMode(0.0)
        commonest = int(table.commonest_first()[0])
        return FittedFillMode(float(table.values[commonest].as_py()) + 0.0)


@dataclass(frozen=True, slots=True)
class FittedFillMode(Fill):
    why: ClassVar[str] = "commonest"


register(FillMode, FittedFillMode)
