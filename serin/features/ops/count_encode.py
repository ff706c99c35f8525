"""A value becomes the number of training rows that have it: 0 for an unseen one. Null counts as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.value_counts import ValueCounts, ValueTable
from serin.features.fitted import Floats
from serin.features.operator import Operator, Source, register
from serin.features.sample import Sample
from serin.features.value_table import NumbersByValue, StoredTable
from serin.formats.schema import Kind
from serin.spec.steps.step import VALUES

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


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
class FittedCountEncode(StoredTable):
    exact: ClassVar[bool] = True
    inner: ClassVar[None] = None
    column: str
    kind: Kind
    table: NumbersByValue

    @property
    def columns(self) -> Mapping[str, Kind]:
        return {self.column: self.kind}

    def outputs(self) -> tuple[str, ...]:
        return (f"{self.column}_count",)

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        return self.table.transform(sample.columns[self.column])

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        return self.table.to_onnx(graph, inputs[self.column], self.kind)

    def describe(self) -> str:
        return f"how many training rows have the value, for {len(self.table.keys)} values"


register(CountEncode, FittedCountEncode)
