"""Aggregates of numbers: how often which bit pattern, or which number, occurs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import array_module, on_host, tally
from serin.features.aggregates.counted import Counted
from serin.features.aggregates.value_counts import ValueTable, merge_tables, sum_tables
from serin.features.numbers import Numbers
from serin.features.sample import Sample

Counts = npt.NDArray[np.int64]
_BLOCK = 2**14  # rows that stay in the processor's cache from one operation to the next
_ALL = 2**62


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
        for values in self.numbers.blocks(sample, block_rows(sample, 16 * _BLOCK)):
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
        for values in self.numbers.blocks(sample, block_rows(sample, 16 * _BLOCK)):
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
