"""Values become codes: 0 null, 1 .. buckets out of vocabulary (by hash), then the vocabulary by descending count; or by
their hash alone, where nothing is fitted and no value is unknown. Codes may become columns of 0 and 1, one for each
code except null's: null is 0 in all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from serin.columns.column import Column, any_true, array_module
from serin.columns.hashing import hash_ints, hash_strings
from serin.columns.keys import label_encoder
from serin.errors import ColumnUnusable
from serin.features.aggregates.aggregate import Fit, ready
from serin.features.aggregates.value_counts import ValueCounts, ValueTable, merge_tables, span_of
from serin.features.fitted import Codes, Floats, Sample, StoredFields
from serin.features.numbers import CategoricalFeature
from serin.features.operator import Operator, Source, register
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import INT64_NULL, Kind
from serin.spec.steps.step import VALUES

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


MOST_COLUMNS = 1024
_FLOAT, _INT64 = 1, 7  # onnx.TensorProto
_DENSE = 2**20  # integers within so wide a range are coded by a table


class Categorify(Operator):
    """Codes: 0 null, then `buckets` codes for what is out of vocabulary, then the vocabulary by descending count."""

    name = "categorify"
    kinds = VALUES
    gives = "codes"
    min_count: int = Field(default=1, ge=1)
    """The number of training rows that a value needs to be in the vocabulary."""
    max_size: int | None = Field(default=None, ge=1)
    """The largest size of the vocabulary. By default no limit."""
    buckets: int = Field(default=1, ge=1)
    """The number of codes that values outside the vocabulary share, by their hash."""
    joint: bool = False
    """Use one vocabulary for all columns of the feature."""

    @property
    def shared(self) -> bool:
        return self.joint

    def misfits(self, columns: Sequence[str], kinds: Mapping[str, str]) -> Iterator[str]:
        if self.joint and len({kinds[column] == "string" for column in columns}) > 1:
            yield "a joint vocabulary needs columns of one kind: all strings, or all integers"

    def fit(self, source: Source) -> Fit[FittedCategorify]:
        vocabulary = yield from fit_vocabulary(source.columns, self.min_count, self.max_size)
        return FittedCategorify(vocabulary, self.buckets)


def fit_vocabulary(columns: Sequence[str], min_count: int, max_size: int | None) -> Fit[pa.Array]:
    """One vocabulary for all these columns: a value counts in whichever column it occurs."""
    counted: tuple[ValueTable, ...] = yield tuple(ValueCounts(column) for column in columns)
    table = reduce(merge_tables, counted)
    order = table.commonest_first(max_size)
    order = order[table.counts[order] >= min_count]
    return table.values.take(pa.array(order))


@dataclass(frozen=True, slots=True, eq=False)
class FittedCategorify:
    vocabulary: pa.Array  # of strings or int64, by descending count, ties by value (strings: by their bytes)
    buckets: int

    @property
    def size(self) -> int:
        return 1 + self.buckets + len(self.vocabulary)

    def outputs(self, column: str) -> tuple[CategoricalColumn, ...]:
        return (CategoricalColumn(name=column, size=self.size),)

    def labels(self) -> tuple[tuple[str, ...], ...]:
        buckets = ["<other>"] if self.buckets == 1 else [f"<other {n}>" for n in range(1, 1 + self.buckets)]
        return (("null", *buckets, *map(str, self.vocabulary.to_pylist())),)

    def transform(self, column: Column) -> tuple[Codes, ...]:
        xp = array_module(column.values)
        if column.dictionary is not None:
            table = np.append(self._codes(column.dictionary), 0).astype(np.int32)
            if xp is np:  # the code -1 of a null finds the last entry; twice as fast as an index
                return (np.take(table, column.values, mode="wrap"),)
            return (xp.asarray(table)[column.values],)
        values, null = column.values.astype(np.int64, copy=False), column.null
        if xp is not np:
            return (self._codes_on_gpu(values, null),)
        present = values[~null] if any_true(null) else values
        codes = np.zeros(len(values), np.int32)
        codes[~null] = self._codes_of_ints(present)
        return (codes,)

    def _codes_of_ints(self, values: Any) -> Codes:
        low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
        if high - low >= _DENSE or high - low > 4 * len(values):
            return self._codes(pa.array(values))
        dense: Codes = self._codes(pa.array(np.arange(low, high + 1)))[values - low]
        return dense

    def _codes_on_gpu(self, values: Any, null: Any) -> Codes:
        """By a table over the values' range, or over the values that occur."""
        xp = array_module(values)
        low, high = span_of(values, null)
        if high < low:
            nothing: Codes = xp.zeros(len(values), np.int32)
            return nothing
        if high - low < _DENSE:
            table, place = self._codes(pa.array(np.arange(low, high + 1))), xp.where(null, 0, values - low)
        else:
            distinct, place = xp.unique(values, return_inverse=True)
            table = self._codes(pa.array(distinct.get()))
        codes: Codes = xp.where(null, np.int32(0), xp.asarray(table)[place])
        return codes

    def _codes(self, values: pa.Array) -> Codes:
        """One code per value; none of the values null."""
        place = pc.index_in(values, value_set=self.vocabulary.cast(values.type))
        known = np.asarray(place.fill_null(-1).to_numpy(zero_copy_only=False)).astype(np.int32)
        if self.buckets == 1:
            outside: Any = np.int32(1)
        else:
            hashes = hash_strings(values) if pa.types.is_string(values.type) else hash_ints(values.to_numpy())
            outside = (1 + hashes % np.uint32(self.buckets)).astype(np.int32)
        return np.where(known < 0, outside, known + np.int32(1 + self.buckets))

    def to_onnx(self, graph: GraphBuilder, values: str, kind: Kind) -> tuple[str, ...]:
        text = kind == "string"
        if kind == "bool":
            values = graph.op("Cast", values, to=_INT64)
        null: str | int = "" if text else (-1 if kind == "bool" else INT64_NULL)
        codes = label_encoder(
            graph,
            values,
            keys=[null, *self.vocabulary.to_pylist()],
            places=[0, *range(1 + self.buckets, self.size)],
            default=1 if self.buckets == 1 else -1,
        )
        if self.buckets == 1:
            return (codes,)
        outside = bucket_to_onnx(graph, values, self.buckets)
        unknown = graph.op("Less", codes, graph.constant(np.int64(0), "zero"))
        return (graph.op("Where", unknown, outside, codes),)

    def describe(self) -> str:
        return (
            f"{len(self.vocabulary)} values in the vocabulary, {self.buckets} code(s) for others, 0 for null"
        )

    def to_json(self) -> dict[str, Any]:
        kind = "string" if pa.types.is_string(self.vocabulary.type) else "int"
        return {"buckets": self.buckets, "of": kind, "vocabulary": self.vocabulary.to_pylist()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FittedCategorify:
        kind = pa.string() if document["of"] == "string" else pa.int64()
        return cls(pa.array(document["vocabulary"], kind), int(document["buckets"]))


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


class OneHot(Operator):
    """A column of 0 and 1 for each code, or for each value as categorify would code it; null is 0 in all."""

    name = "one_hot"
    kinds = VALUES
    follows = ("raw", "codes")
    gives = "end"
    min_count: int = Field(default=1, ge=1)
    """The number of training rows that a value needs to get its own column."""
    max_size: int | None = Field(default=64, ge=1)
    """The largest number of values with their own column. `null` sets no limit."""

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}=",)

    def fit(self, source: Source) -> Fit[FittedOneHot]:
        if source.codes is not None:
            return FittedOneHot.of(source.codes)
        vocabulary = yield from fit_vocabulary(source.columns, self.min_count, self.max_size)
        step = FittedCategorify(vocabulary, buckets=1)
        return FittedOneHot.of(CategoricalFeature(column=source.column, kind=source.kind, step=step))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedOneHot:
    exact: ClassVar[bool] = True
    inner: CategoricalFeature

    @classmethod
    def of(cls, codes: CategoricalFeature) -> FittedOneHot:
        for output in codes.outputs:
            if output.size > 1 + MOST_COLUMNS:
                raise ColumnUnusable(
                    column=output.name,
                    problem=f"one_hot of {output.name!r} would make {output.size - 1:,} columns; set max_size, "
                    f"or remove one_hot and let the network embed the codes (at most {MOST_COLUMNS} columns)",
                )
        return cls(inner=codes)

    @property
    def columns(self) -> Mapping[str, Kind]:
        return self.inner.columns

    def outputs(self) -> tuple[str, ...]:
        labelled = zip(self.inner.outputs, self.inner.step.labels(), strict=True)
        return tuple(f"{output.name}={label}" for output, labels in labelled for label in labels[1:])

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        made = zip(self.inner.outputs, self.inner.transform(sample), strict=True)
        return tuple(
            (codes == np.int32(code)).astype(np.float32)
            for output, codes in made
            for code in range(1, output.size)
        )

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        made = zip(self.inner.outputs, self.inner.to_onnx(graph, inputs), strict=True)
        return tuple(
            graph.op("Cast", graph.op("Equal", codes, graph.constant(np.int64(code), "code")), to=_FLOAT)
            for output, codes in made
            for code in range(1, output.size)
        )

    def describe(self) -> str:
        return f"{self.inner.describe()}; a column of 0 and 1 for each code but null's"

    def to_json(self) -> dict[str, Any]:
        return {}

    @classmethod
    def from_json(cls, document: dict[str, Any], inner: CategoricalFeature) -> FittedOneHot:  # noqa: ARG003
        return cls(inner=inner)


register(Categorify, FittedCategorify)
register(HashBucket, FittedHashBucket)
register(OneHot, FittedOneHot)
