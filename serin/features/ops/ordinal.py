"""A value becomes its place in an order: the spec's own, or that of the training split's values. Others are null."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.sample import Sample
from serin.features.aggregates.value_counts import ValueCounts, ValueTable
from serin.features.fitted import Floats
from serin.features.value_table import NumbersByValue
from serin.formats.schema import Kind
from serin.spec import steps as spec

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ordinal:
    name: ClassVar[str] = "ordinal"
    exact: ClassVar[bool] = True
    inner: ClassVar[None] = None
    column: str
    kind: Kind
    order: pa.Array

    @classmethod
    def fit(cls, step: spec.Ordinal, column: str, kind: Kind) -> Fit[Ordinal]:
        if step.order is not None:
            values = pa.array(list(step.order), pa.string() if kind == "string" else pa.int64())
        else:
            table: ValueTable = yield ValueCounts(column)
            values = table.values.take(pc.sort_indices(table.values))  # text by its bytes
        return cls(column=column, kind=kind, order=values)

    @property
    def columns(self) -> Mapping[str, Kind]:
        return {self.column: self.kind}

    def outputs(self) -> tuple[str, ...]:
        return (self.column,)

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        return self._table().transform(sample.columns[self.column])

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        return self._table().to_onnx(graph, inputs[self.column], self.kind)

    def _table(self) -> NumbersByValue:
        places = np.append(np.arange(len(self.order), dtype=np.float32), np.full(2, np.nan, np.float32))
        return NumbersByValue(self.order, places[:, None].astype(np.float32))

    def describe(self) -> str:
        shown = ", ".join(map(str, self.order[:6].to_pylist())) + (", ..." if len(self.order) > 6 else "")
        return f"place among {len(self.order)} values ({shown}); others are null"

    def to_json(self) -> dict[str, Any]:
        of = "string" if pa.types.is_string(self.order.type) else "int"
        return {"column": self.column, "kind": self.kind, "of": of, "order": self.order.to_pylist()}

    @classmethod
    def from_json(cls, document: dict[str, Any], inner: None = None) -> Ordinal:  # noqa: ARG003
        type_ = pa.string() if document["of"] == "string" else pa.int64()
        order = pa.array(document["order"], type_)
        return cls(column=document["column"], kind=document["kind"], order=order)
