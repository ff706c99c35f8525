"""How often each value of a column, each number or each bit pattern of numbers occurs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Column, any_true, array_module, on_host, tally
from serin.features.aggregates.aggregate import Counted
from serin.features.fitted import Sample
from serin.features.numbers import Numbers
from serin.formats.nulls import null_of

Counts = npt.NDArray[np.int64]
_BLOCK = 2**15
_CACHED = 2**14  # rows that stay in the processor's cache from one operation to the next
_ALL = 2**62
_DENSE = 2**20  # integers within so wide a range are counted in a table, on a GPU


@dataclass(frozen=True, slots=True, eq=False)
class ValueTable:
    """Distinct values (none null) and how often each occurs; nulls are counted in `nulls`."""

    values: pa.Array
    counts: Counts
    nulls: int

    def commonest_first(self, most: int | None = None) -> npt.NDArray[np.intp]:
        """The order of values by descending count, ties by value (strings: by their bytes). At most so many, if given:
        the others are not sorted."""
        chosen = np.arange(len(self.counts))
        if most is not None and most < len(self.counts):
            chosen = np.flatnonzero(self.counts >= np.partition(self.counts, -most)[-most])
        by_value = pc.sort_indices(self.values.take(pa.array(chosen))).to_numpy()
        order: npt.NDArray[np.intp] = chosen[by_value]
        return order[np.argsort(-self.counts[order], kind="stable")][:most]


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
    present = values[~null] if any_true(null) else values
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


@dataclass(frozen=True, slots=True)
class NumberAggregate:
    on_gpu: ClassVar[bool] = True
    numbers: Numbers

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.numbers.columns)

    @property
    def counted(self) -> str | None:
        return self.numbers.column if self.numbers.encoding is None else None

    def _of_entries(self, values: Counted) -> Any:
        return self.numbers.of(Sample(columns={self.numbers.column: values.entries}))


@dataclass(frozen=True, slots=True)
class HighBits(NumberAggregate):
    """The number of rows by the upper 16 bits of their float32 form: int64[65536], indexed by the bits."""

    def measure(self, sample: Sample) -> Counts:
        counts = np.zeros(65536, np.int64)
        for values in self.numbers.blocks(sample, block_rows(sample, 16 * _CACHED)):
            if array_module(values) is np:
                counts += np.bincount(_halves(values)[1::2], minlength=65536)
            else:
                counts += count_codes(_bits(values) >> np.uint32(16), 65536)
        return counts

    def measure_counted(self, values: Counted) -> Counts:
        upper = _halves(self._of_entries(values))[1::2]
        return _added(upper, values.counts)

    def merge(self, left: Counts, right: Counts) -> Counts:
        return left + right


@dataclass(frozen=True, slots=True)
class LowBits(NumberAggregate):
    """The number of rows by the lower 16 bits, among those with these upper 16 bits: int64[65536]."""

    upper: int

    def measure(self, sample: Sample) -> Counts:
        counts = np.zeros(65536, np.int64)
        for values in self.numbers.blocks(sample, block_rows(sample, 16 * _CACHED)):
            if array_module(values) is np:
                halves = _halves(values)
                chosen = halves[0::2][halves[1::2] == self.upper]
                if len(chosen):
                    counts += np.bincount(chosen, minlength=65536)
            else:
                bits = _bits(values)
                chosen = bits[(bits >> np.uint32(16)) == np.uint32(self.upper)]
                counts += count_codes(chosen & np.uint32(0xFFFF), 65536)
        return counts

    def measure_counted(self, values: Counted) -> Counts:
        halves = _halves(self._of_entries(values))
        chosen = halves[1::2] == self.upper
        return _added(halves[0::2][chosen], values.counts[chosen])

    def merge(self, left: Counts, right: Counts) -> Counts:
        return left + right


@dataclass(frozen=True, slots=True)
class NumberCounts(NumberAggregate):
    """How often each number occurs; -0 counts as 0, and infinite ones take no part."""

    def measure(self, sample: Sample) -> ValueTable:
        values: Any = self.numbers.of(sample)
        finite = values[np.isfinite(values)] + np.float32(0)
        if isinstance(finite, np.ndarray):
            table = pc.value_counts(pa.array(finite))
            counts = np.asarray(table.field("counts").to_numpy()).astype(np.int64)
            return ValueTable(table.field("values"), counts, len(values) - len(finite))
        distinct, seen = array_module(finite).unique(finite, return_counts=True)
        return ValueTable(pa.array(distinct.get()), seen.get().astype(np.int64), len(values) - len(finite))

    def measure_counted(self, values: Counted) -> ValueTable:
        numbers = self._of_entries(values)
        finite = np.isfinite(numbers)
        lost = int(values.counts[~finite].sum())
        return sum_tables(pa.array(numbers[finite] + np.float32(0)), values.counts[finite], lost)

    def merge(self, left: ValueTable, right: ValueTable) -> ValueTable:
        return merge_tables(left, right)


def count_codes(codes: Any, size: int) -> Counts:
    """The number of each code (0 .. size - 1), on the host."""
    return on_host(tally(codes, size)).astype(np.int64)


def block_rows(sample: Sample, rows: int) -> int:
    """The number of rows in a block: a GPU takes all rows at once."""
    arrays = [column.values for column in sample.columns.values()]
    xp = array_module(*arrays, *(() if sample.target is None else (sample.target,)))
    return rows if xp is np else _ALL


def _added(halves: npt.NDArray[np.uint16], counts: Counts) -> Counts:
    total = np.zeros(65536, np.int64)
    np.add.at(total, halves, counts)
    return total


def _bits(values: Any) -> Any:
    """The bits of each float32 value, as an integer."""
    return array_module(values).ascontiguousarray(values).view(np.uint32)


def _halves(values: Any) -> npt.NDArray[np.uint16]:
    """The lower and the upper 16 bits of each float32, in turn."""
    return np.ascontiguousarray(values).view(np.uint16)
