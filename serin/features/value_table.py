"""Numbers by value: what an encoding learned for each value of a column, in arrays and in the ONNX graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Column, array_module
from serin.columns.keys import label_encoder
from serin.features.aggregates.value_counts import group_rows
from serin.features.fitted import Floats, Sample, StoredFields
from serin.formats.schema import INT64_NULL, Kind

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

_INT64 = 7  # onnx.TensorProto.INT64


@dataclass(frozen=True, slots=True, eq=False)
class NumbersByValue:
    """float32[len(keys) + 2, k]: a row per key, then one for values that are not among the keys, then one for null."""

    keys: pa.Array  # strings or int64, all different, none null
    numbers: npt.NDArray[np.float32]

    def places(self, column: Column) -> Any:
        """The row of `numbers` for each row of the column, where the column is."""
        groups, values = group_rows(column)
        found = pc.index_in(values, value_set=self.keys.cast(values.type))
        table = np.asarray(found.fill_null(len(self.keys)).to_numpy(zero_copy_only=False)).astype(np.int64)
        return array_module(groups).asarray(np.append(table, len(self.keys) + 1))[groups]

    def transform(self, column: Column) -> tuple[Any, ...]:
        places = self.places(column)
        xp = array_module(places)
        return tuple(xp.asarray(np.ascontiguousarray(each))[places] for each in self.numbers.T)

    def to_onnx(self, graph: GraphBuilder, values: str, kind: Kind) -> tuple[str, ...]:
        """One float32[batch] per number; `values` in wire form."""
        if kind == "bool":
            values = graph.op("Cast", values, to=_INT64)
        null: str | int = "" if kind == "string" else (-1 if kind == "bool" else INT64_NULL)
        known = len(self.keys)
        places = label_encoder(
            graph,
            values,
            keys=[null, *self.keys.to_pylist()],
            places=[known + 1, *range(known)],
            default=known,
        )
        tables = [graph.constant(np.ascontiguousarray(each), "numbers") for each in self.numbers.T]
        return tuple(graph.op("Gather", table, places, axis=0) for table in tables)

    def to_json(self) -> dict[str, Any]:
        return {
            "of": "string" if pa.types.is_string(self.keys.type) else "int",
            "keys": self.keys.to_pylist(),
            "numbers": [
                [None if value != value else value for value in row] for row in self.numbers.tolist()
            ],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> NumbersByValue:
        keys = pa.array(document["keys"], pa.string() if document["of"] == "string" else pa.int64())
        rows = [[float("nan") if value is None else value for value in row] for row in document["numbers"]]
        numbers = np.asarray(rows, np.float32).reshape(len(keys) + 2, -1)
        return cls(keys, numbers)


class StoredTable(StoredFields):
    """The same for what has such a table."""

    __slots__ = ()

    @staticmethod
    def value_of(plain: Any) -> Any:
        return NumbersByValue.from_json(plain) if isinstance(plain, dict) else StoredFields.value_of(plain)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableEncoding(StoredTable):
    """The common part of encodings that have numbers for each value of a column."""

    exact: ClassVar[bool] = True
    inner: ClassVar[None] = None
    column: str
    kind: Kind
    table: NumbersByValue

    @property
    def columns(self) -> Mapping[str, Kind]:
        return {self.column: self.kind}

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        return self.table.transform(sample.columns[self.column])

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        return self.table.to_onnx(graph, inputs[self.column], self.kind)
