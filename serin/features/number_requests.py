"""Requests about numbers: how often which bit pattern occurs, and sums in fixed point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.features.column import array_module, on_host, tally
from serin.features.counted import Counted
from serin.features.numbers import Numbers
from serin.features.sample import Sample
from serin.features.value_counts import ValueTable, merge_tables, sum_tables

Counts = npt.NDArray[np.int64]
_BLOCK = 2**14  # rows that stay in the processor's cache from one operation to the next
FIXED_BITS = 31
_ALL = 2**62


@dataclass(frozen=True, slots=True)
class _OfNumbers:
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
class HighBits(_OfNumbers):
    """How many rows have which upper 16 bits in their float32 form. int64[65536], by the bits as they are."""

    def measure(self, sample: Sample) -> Counts:
        counts = np.zeros(65536, np.int64)
        for values in self.numbers.blocks(sample, _rows(sample, 16 * _BLOCK)):
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
class LowBits(_OfNumbers):
    """Among the rows with these upper 16 bits, how many have which lower 16 bits. int64[65536]."""

    upper: int

    def measure(self, sample: Sample) -> Counts:
        counts = np.zeros(65536, np.int64)
        for values in self.numbers.blocks(sample, _rows(sample, 16 * _BLOCK)):
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
class Sums:
    """The sum of values and of squares, as whole numbers: a sum of quantised values does not depend on its order."""

    count: int
    total: int
    squares: int


@dataclass(frozen=True, slots=True)
class FixedPointSums(_OfNumbers):
    """Sums in units of 2^(exponent - 31), where every finite |value| <= 2^exponent."""

    exponent: int

    def measure(self, sample: Sample) -> Sums:
        sums = Sums(0, 0, 0)
        scale = 2.0 ** (FIXED_BITS - self.exponent)
        buffers = np.empty((3, _BLOCK))
        for values in self.numbers.blocks(sample, _rows(sample, _BLOCK)):
            block = _host_sums(values, scale, buffers) if array_module(values) is np else _sums(values, scale)
            sums = self.merge(sums, block)
        return sums

    def measure_counted(self, values: Counted) -> Sums:
        numbers = self._of_entries(values)
        finite = np.isfinite(numbers)
        counts = values.counts[finite]
        fixed = np.rint(numbers[finite].astype(np.float64) * 2.0 ** (FIXED_BITS - self.exponent))
        high = np.floor(fixed * 2.0**-16)
        low = fixed - high * 2.0**16
        squares = [_weighed(part, counts) for part in (high * high, high * low, low * low)]
        total = (squares[0] << 32) + (squares[1] << 17) + squares[2]
        return Sums(int(counts.sum()), _weighed(fixed, counts), total)

    def merge(self, left: Sums, right: Sums) -> Sums:
        return Sums(left.count + right.count, left.total + right.total, left.squares + right.squares)


@dataclass(frozen=True, slots=True)
class NumberCounts(_OfNumbers):
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
    """How many of the codes (0 .. size - 1) are which; on the host, wherever the codes are."""
    return on_host(tally(codes, size)).astype(np.int64)


def _rows(sample: Sample, rows: int) -> int:
    """The size of a block: a GPU has no use for small ones."""
    arrays = [column.values for column in sample.columns.values()]
    xp = array_module(*arrays, *(() if sample.target is None else (sample.target,)))
    return rows if xp is np else _ALL


def _host_sums(values: Any, scale: float, buffers: npt.NDArray[np.float64]) -> Sums:
    finite = np.isfinite(values)
    if not finite.all():
        values = values[finite]
    # All that follows is exact: whole numbers below 2^53 in float64, whatever the order of addition.
    fixed, high, low = buffers[:, : len(values)]
    np.rint(np.multiply(values, scale, out=fixed, dtype=np.float64), out=fixed)
    np.floor(np.multiply(fixed, 2.0**-16, out=high), out=high)
    np.subtract(fixed, np.multiply(high, 2.0**16, out=low), out=low)
    squares = (_dot(high, high) << 32) + (_dot(high, low) << 17) + _dot(low, low)
    return Sums(len(values), int(fixed.sum()), squares)


def _sums(values: Any, scale: float) -> Sums:
    """The same sums on a GPU, in whole numbers: float64 atomics would be exact too, but int64 needs no argument."""
    finite = np.isfinite(values)
    scaled = np.rint(values.astype(np.float64) * scale)
    fixed = np.where(finite, scaled, 0.0).astype(np.int64)
    high, low = fixed >> 16, fixed & 0xFFFF
    parts = [finite.astype(np.int64), fixed, high * high, high * low, low * low]
    count, total, upper, mixed, lower = (int(part.sum(dtype=np.int64)) for part in parts)
    return Sums(count, total, (upper << 32) + (mixed << 17) + lower)


def _added(halves: npt.NDArray[np.uint16], counts: Counts) -> Counts:
    total = np.zeros(65536, np.int64)
    np.add.at(total, halves, counts)
    return total


def _weighed(values: npt.NDArray[np.float64], counts: Counts) -> int:
    """The sum of whole numbers below 2^33, each as often as its count says; exact."""
    whole = values.astype(np.int64)
    if int(counts.sum()) < 2**29:
        return int(np.dot(whole, counts))
    return int(np.dot(whole.astype(object), counts.astype(object)))


def _bits(values: Any) -> Any:
    """The float32 form of each value, as a whole number."""
    return array_module(values).ascontiguousarray(values).view(np.uint32)


def _halves(values: Any) -> npt.NDArray[np.uint16]:
    """The lower and the upper 16 bits of each float32, in turn."""
    return np.ascontiguousarray(values).view(np.uint16)


def _dot(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> int:
    # without the threads of a BLAS, which cost more than they bring here
    return int(np.einsum("i,i->", left, right))
