"""Nulls become the training split's commonest value; of several, the smallest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.distribution import Distribution
from serin.features.aggregates.number_counts import NumberCounts
from serin.features.aggregates.value_counts import ValueTable
from serin.features.filling import Fill


@dataclass(frozen=True, slots=True)
class FillMode(Fill):
    name: ClassVar[str] = "fill_mode"
    why: ClassVar[str] = "commonest"

    @classmethod
    def fit(cls, data: Distribution) -> Fit[Distribution]:
        table: ValueTable = yield NumberCounts(data.numbers)
        if len(table.values) == 0:  # what the steps made is infinite throughout
            return data.after_fill(cls(0.0), 0.0)
        commonest = int(table.commonest_first()[0])
        fill = cls(float(table.values[commonest].as_py()) + 0.0)
        return data.after_fill(fill, fill.value)
