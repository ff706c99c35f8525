"""A value becomes one of a fixed number of codes by its hash: nothing is fitted, no value is unknown. 0 is null."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from serin.columns.column import Column, array_module
from serin.columns.hashing import hash_ints, hash_strings
from serin.features.aggregates.aggregate import Fit, ready
from serin.features.fitted import Codes, StoredFields
from serin.features.operator import Operator, Source, register
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import INT64_NULL, Kind
from serin.spec.steps.step import VALUES

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

_INT64 = 7  # onnx.TensorProto.INT64


class HashBucket(Operator):
    """One of `buckets` codes, by the hash of the value; 0 is null."""

    name = "hash_bucket"
    kinds = VALUES
    gives = "codes"
    positional = "buckets"
    buckets: int = Field(ge=1, le=2**31 - 2)
    """The number of codes."""

    def fit(self, source: Source) -> Fit[FittedHashBucket]:
        del source
        return ready(FittedHashBucket(self.buckets))


@dataclass(frozen=True, slots=True)
class FittedHashBucket(StoredFields):
    buckets: int

    def outputs(self, column: str) -> tuple[CategoricalColumn, ...]:
        return (CategoricalColumn(name=column, size=1 + self.buckets),)

    def labels(self) -> tuple[tuple[str, ...], ...]:
        return (("null", *map(str, range(1, 1 + self.buckets))),)

    def transform(self, column: Column) -> tuple[Codes, ...]:
        xp = array_module(column.values)
        if column.dictionary is not None:
            table = np.append(self._codes(hash_strings(column.dictionary)), np.int32(0))
            return (xp.asarray(table)[column.values],)
        codes = self._codes(hash_ints(column.values.astype(np.int64)))
        return (xp.where(column.null, np.int32(0), codes),)

    def _codes(self, hashes: Any) -> Any:
        return (hashes % np.uint32(self.buckets)).astype(np.int32) + np.int32(1)

    def to_onnx(self, graph: GraphBuilder, values: str, kind: Kind) -> tuple[str, ...]:
        if kind == "bool":
            values = graph.op("Cast", values, to=_INT64)
        code = bucket_to_onnx(graph, values, self.buckets)
        if kind == "string":
            null = graph.constant(np.asarray("", object), "null")
        else:
            null = graph.constant(np.int64(-1 if kind == "bool" else INT64_NULL), "null")
        zero = graph.constant(np.int64(0), "zero")
        return (graph.op("Where", graph.op("Equal", values, null), zero, code),)

    def describe(self) -> str:
        return f"one of {self.buckets} codes by hash; 0 for null"


def bucket_to_onnx(graph: GraphBuilder, values: str, buckets: int) -> str:
    """int64[batch]: 1 + hash % buckets of strings or integers."""
    hashed = graph.op("MurmurHash3", values, domain="com.microsoft", positive=1, seed=0)
    bucket = graph.op("Mod", hashed, graph.constant(np.uint32(buckets), "buckets"))
    return graph.op("Add", graph.op("Cast", bucket, to=_INT64), graph.constant(np.int64(1), "one"))


register(HashBucket, FittedHashBucket)
