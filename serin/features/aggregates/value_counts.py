"""How often each value of a column occurs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Column, array_module, on_host, tally
from serin.features.aggregates.counted import Counted
from serin.features.sample import Sample
from serin.formats.nulls import null_of

Counts = npt.NDArray[np.int64]
_BLOCK = 2**15
_DENSE = 2**20  # integers within so wide a range are counted in a table, on a GPU


@dataclass(frozen=True, slots=True, eq=False)
class ValueTable:
    """Distinct values (none null) and how often each occurs; nulls are counted in `nulls`."""

    values: pa.Array
    counts: Counts
    nulls: int

    def commonest_first(self) -> npt.NDArray[np.intp]:
        """The order of values by descending count, ties by value (strings: by their bytes)."""
        order = np.asarray(pc.sort_indices(self.values).to_numpy())
        return order[np.argsort(-self.counts[order], kind="stable")]


@dataclass(frozen=True, slots=True)
class ValueCounts:
    """How often each value occurs. The order of values is undefined: sort before use."""

    on_gpu: ClassVar[bool] = True
    column: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def counted(self) -> str:
        return self.column

    def measure_counted(self, values: Counted) -> ValueTable:
        null = values.entries.null
        present = values.entries.values[~null].astype(np.int64)
        return sum_tables(pa.array(present), values.counts[~null], int(values.counts[null].sum()))

    def measure(self, sample: Sample) -> ValueTable:
        column = sample.columns[self.column]
        if column.dictionary is not None and isinstance(column.values, np.ndarray):
            return _count_texts(column)
        groups, values = group_rows(column)
        counts = on_host(tally(groups, len(values) + 1)).astype(np.int64)
        seen = np.flatnonzero(counts[:-1])
        return ValueTable(values.take(pa.array(seen)), counts[:-1][seen], int(counts[-1]))

    def merge(self, left: ValueTable, right: ValueTable) -> ValueTable:
        return merge_tables(left, right)


def _count_texts(column: Column) -> ValueTable:
    assert column.dictionary is not None
    size = len(column.dictionary) + 1
    counts = np.zeros(size, np.int64)
    for block in column.blocks(max(_BLOCK, 4 * size)):
        codes = block.values
        try:
            counts += np.bincount(codes, minlength=size)
        except ValueError:  # there are nulls, which are below 0
            counts += np.bincount(np.where(codes < 0, size - 1, codes), minlength=size)
    seen = np.flatnonzero(counts[:-1])
    return ValueTable(column.dictionary.take(pa.array(seen)), counts[seen], int(counts[-1]))


def group_rows(column: Column) -> tuple[Any, pa.Array]:
    """For each row the position of its value among those that occur (strings or int64); null comes after them."""
    xp = array_module(column.values)
    if column.dictionary is not None:
        codes = column.values
        return xp.where(codes < 0, len(column.dictionary), codes), column.dictionary
    if xp is not np:
        return _group_on_gpu(column)
    null = column.null
    values = column.values.astype(np.int64, copy=False)
    present = values[~null] if null.any() else values
    encoded = pa.array(present).dictionary_encode()
    distinct, place = encoded.dictionary, np.asarray(encoded.indices.to_numpy())
    if len(present) == len(values):
        return place, distinct
    groups = np.full(len(values), len(distinct), np.int64)
    groups[~null] = place
    return groups, distinct


def span_of(values: Any, null: Any) -> tuple[int, int]:
    """The smallest and the largest of the integers that are not null, on a GPU; (0, -1) when there is none."""
    ends = np.iinfo(np.int64)
    low = int(np.where(null, np.int64(ends.max), values).min()) if len(values) else ends.max
    high = int(np.where(null, np.int64(ends.min), values).max()) if len(values) else ends.min
    return (low, high) if low <= high else (0, -1)


def _group_on_gpu(column: Column) -> tuple[Any, pa.Array]:
    """By counting where the values are from a narrow range, else by sorting them."""
    xp = array_module(column.values)
    values, null = column.values.astype(np.int64, copy=False), column.null
    low, high = span_of(values, null)
    if high - low < _DENSE:
        return xp.where(null, np.int64(high - low + 1), values - low), pa.array(np.arange(low, high + 1))
    distinct, places = xp.unique(values, return_inverse=True)
    host = distinct.get()
    if host[0] != null_of(column.kind):  # the smallest of all, if it is there
        return places, pa.array(host)
    return xp.where(null, np.int64(len(host) - 1), places - 1), pa.array(host[1:])


def merge_tables(left: ValueTable, right: ValueTable) -> ValueTable:
    values = pa.concat_arrays([left.values, right.values])
    return sum_tables(values, np.concatenate([left.counts, right.counts]), left.nulls + right.nulls)


def sum_tables(values: pa.Array, counts: Counts, nulls: int) -> ValueTable:
    """The table of values that may be repeated."""
    encoded = values.dictionary_encode()
    total = np.zeros(len(encoded.dictionary), np.int64)
    np.add.at(total, encoded.indices.to_numpy(), counts)
    return ValueTable(encoded.dictionary, total, nulls)
