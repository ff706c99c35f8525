"""Maps a value to its position in an order: the spec's, or that of the training split's values. Others are null."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, field_validator

from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.value_counts import ValueCounts, ValueTable
from serin.features.operator import Operator, Source, register
from serin.features.value_table import NumbersByValue, TableEncoding
from serin.formats.schema import Kind
from serin.spec.steps.step import VALUES


class Ordinal(Operator):
    """The position of the value in `order`, or among the sorted values of the training split. Other values are null."""

    name = "ordinal"
    kinds = VALUES
    positional = "order"
    order: tuple[str | int, ...] | None = Field(default=None, min_length=1)
    """The values in their order. By default the sorted values of the training split."""

    @field_validator("order")
    @classmethod
    def _names_each_once(cls, order: tuple[str | int, ...] | None) -> tuple[str | int, ...] | None:
        if order is not None and len(set(order)) < len(order):
            raise ValueError("`order` names a value twice")
        if order is not None and len({type(value) for value in order}) > 1:
            raise ValueError("`order` mixes strings and numbers; quote all numbers, or none")
        return order

    def misfit(self, kind: str) -> str | None:
        text = self.order is not None and isinstance(self.order[0], str)
        if self.order is None or text == (kind == "string"):
            return None
        return f"the order has {'strings' if text else 'numbers'}"

    def fit(self, source: Source) -> Fit[FittedOrdinal]:
        if self.order is not None:
            values = pa.array(list(self.order), pa.string() if source.kind == "string" else pa.int64())
        else:
            table: ValueTable = yield ValueCounts(source.column)
            values = table.values.take(pc.sort_indices(table.values))  # strings by their bytes
        return FittedOrdinal.of(source.column, source.kind, values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedOrdinal(TableEncoding):
    @classmethod
    def of(cls, column: str, kind: Kind, order: pa.Array) -> FittedOrdinal:
        places = np.append(np.arange(len(order), dtype=np.float32), np.full(2, np.nan, np.float32))
        return cls(column=column, kind=kind, table=NumbersByValue(order, places[:, None]))

    def outputs(self) -> tuple[str, ...]:
        return (self.column,)

    def describe(self) -> str:
        order = self.table.keys
        shown = ", ".join(map(str, order[:6].to_pylist())) + (", ..." if len(order) > 6 else "")
        return f"place among {len(order)} values ({shown}); others are null"

    def to_json(self) -> dict[str, Any]:
        of = "string" if pa.types.is_string(self.table.keys.type) else "int"
        return {"column": self.column, "kind": self.kind, "of": of, "order": self.table.keys.to_pylist()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], inner: None = None) -> FittedOrdinal:  # noqa: ARG003
        type_ = pa.string() if document["of"] == "string" else pa.int64()
        return cls.of(document["column"], document["kind"], pa.array(document["order"], type_))


register(Ordinal, FittedOrdinal)
