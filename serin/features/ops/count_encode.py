"""A value becomes the number of training rows that have it: 0 for an unseen one. Null counts as a value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.value_counts import ValueCounts, ValueTable
from serin.features.operator import Operator, Source, register
from serin.features.value_table import NumbersByValue, TableEncoding
from serin.spec.steps.step import VALUES


class CountEncode(Operator):
    """The number of training rows that have the value."""

    name = "count_encode"
    kinds = VALUES

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}_count",)

    def fit(self, source: Source) -> Fit[FittedCountEncode]:
        counted: ValueTable = yield ValueCounts(source.column)
        order = counted.commonest_first()
        counts = np.append(counted.counts[order], [0, counted.nulls]).astype(np.float32)
        table = NumbersByValue(counted.values.take(pa.array(order)), counts[:, None])
        return FittedCountEncode(column=source.column, kind=source.kind, table=table)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedCountEncode(TableEncoding):
    def outputs(self) -> tuple[str, ...]:
        return (f"{self.column}_count",)

    def describe(self) -> str:
        return f"how many training rows have the value, for {len(self.table.keys)} values"


register(CountEncode, FittedCountEncode)
