"""A value becomes the number of training rows that have it: 0 for one that none has. Null counts as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.sample import Sample
from serin.features.aggregates.value_counts import ValueCounts, ValueTable
from serin.features.fitted import Floats
from serin.features.value_table import NumbersByValue
from serin.formats.schema import Kind

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountEncode:
    name: ClassVar[str] = "count_encode"
    exact: ClassVar[bool] = True
    inner: ClassVar[None] = None
    column: str
    kind: Kind
    table: NumbersByValue

    @classmethod
    def fit(cls, column: str, kind: Kind) -> Fit[CountEncode]:
        counted: ValueTable = yield ValueCounts(column)
        order = counted.commonest_first()
        counts = np.append(counted.counts[order], [0, counted.nulls]).astype(np.float32)
        table = NumbersByValue(counted.values.take(pa.array(order)), counts[:, None])
        return cls(column=column, kind=kind, table=table)

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

    def to_json(self) -> dict[str, Any]:
        return {"column": self.column, "kind": self.kind, "table": self.table.to_json()}

    @classmethod
    def from_json(cls, document: dict[str, Any], inner: None = None) -> CountEncode:  # noqa: ARG003
        table = NumbersByValue.from_json(document["table"])
        return cls(column=document["column"], kind=document["kind"], table=table)
