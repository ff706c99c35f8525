"""Exact sums of numbers and of their squares; also by the value of a key column, and by folds of the rows where an
operator needs them. The result does not depend on partitioning or device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.columns.column import array_module, beside, count_true, on_host, tally
from serin.columns.exact import BLOCK, SMALLEST, Limb, Superaccumulator, limbs, span_of, square_limbs
from serin.columns.hashing import hash_ints
from serin.features.aggregates.aggregate import Counted
from serin.features.aggregates.value_counts import NumberAggregate, block_rows, group_rows
from serin.features.fitted import Floats, Sample
from serin.features.numbers import Numbers

Doubles = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
SUM_EXPONENT, SQUARES_EXPONENT = SMALLEST, 2 * SMALLEST
_BLOCK = 2**20  # this many digits of 32 bits can be summed in float64 without rounding
_DIGIT_BITS = 38  # that many per block are summed in float64 without rounding


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of `count` finite values, in units of 2^SUM_EXPONENT and 2^SQUARES_EXPONENT."""

    count: int
    total: int
    squares: int

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.count + other.count, self.total + other.total, self.squares + other.squares)


@dataclass(frozen=True, slots=True)
class ExactSums(NumberAggregate):
    """The sums of all finite values."""

    def measure(self, sample: Sample) -> Sums:
        sums = Sums(0, 0, 0)
        buffers = np.empty((3, BLOCK))
        for values in self.numbers.blocks(sample, block_rows(sample, BLOCK)):
            if array_module(values) is np:
                sums += _sums_of_block(values, *buffers[:, : len(values)])
            else:
                sums += _sums_of_limbs(values, count_true(np.isfinite(values)))
        return sums

    def measure_counted(self, values: Counted) -> Sums:
        numbers = self._of_entries(values)
        finite = np.isfinite(numbers)
        counts = values.counts[finite]
        return _sums_of_limbs(numbers[finite], int(counts.sum()), counts)

    def merge(self, left: Sums, right: Sums) -> Sums:
        return left + right


def _sums_of_block(values: Any, whole: Doubles, squares: Doubles, spare: Doubles) -> Sums:
    """The sums of at most one block of values, on the host; the buffers are as long as a block."""
    span = span_of(values)
    np.multiply(values, 2.0**-span.exponent, out=whole, dtype=np.float64)
    count = len(values)
    if not span.finite:
        finite = np.isfinite(whole)
        count = int(np.count_nonzero(finite))
        np.copyto(whole, 0.0, where=~finite)
    np.multiply(whole, whole, out=squares)
    return Sums(
        count,
        _digits_added(whole, span.bits, spare) << (span.exponent - SUM_EXPONENT),
        _digits_added(squares, 2 * span.bits, spare) << (2 * span.exponent - SQUARES_EXPONENT),
    )


def _digits_added(whole: Doubles, bits: int, spare: Doubles) -> int:
    """Sums integers of so many bits by their digits. Changes both arrays."""
    total = 0
    for number in range((bits - 1) // _DIGIT_BITS, 0, -1):
        unit = 2.0 ** (_DIGIT_BITS * number)
        np.trunc(np.multiply(whole, 1 / unit, out=spare), out=spare)
        total += int(spare.sum()) << (_DIGIT_BITS * number)
        np.subtract(whole, np.multiply(spare, unit, out=spare), out=whole)
    return total + int(whole.sum())


def _sums_of_limbs(values: Any, count: int, counts: Counts | None = None) -> Sums:
    """The sums of any number of values on any device; each counts as often as `counts` says."""
    return Sums(
        count,
        _limbs_added(limbs(values), counts, SUM_EXPONENT),
        _limbs_added(square_limbs(values), counts, SQUARES_EXPONENT),
    )


def _limbs_added(parts: Sequence[Limb], counts: Counts | None, exponent: int) -> int:
    return sum(_weighed(part.digits.astype(np.int64), counts) << (part.exponent - exponent) for part in parts)


def _weighed(digits: Any, counts: Counts | None) -> int:
    if counts is None:
        return int(digits.sum())
    if int(counts.sum()) < 2**31:
        return int(np.dot(digits, counts))
    return int(np.dot(digits.astype(object), counts.astype(object)))


@dataclass(frozen=True, slots=True, eq=False)
class GroupTable:
    """Sums and counts per key; the last row is for null."""

    keys: pa.Array
    counts: Counts  # [keys + 1, folds]
    sums: Superaccumulator  # [keys + 1, folds, classes or 1]
    squares: Superaccumulator | None  # [keys + 1, folds]
    ends: Floats | None  # [keys + 1, 2]: smallest and largest, NaN where there is none


@dataclass(frozen=True, slots=True)
class GroupSums:
    """Exact sums of finite values, or rows per class of the target. `numbers`: None for the target.

    Integers to which no step was applied are summed as they are, not as float32. Squares and extremes are computed only
    where requested.
    """

    on_gpu: ClassVar[bool] = True
    key: str
    numbers: Numbers | None
    folds: int = 1
    classes: int = 0
    squares: bool = False
    ends: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.key, *(() if self.numbers is None else self.numbers.columns))

    def measure(self, sample: Sample) -> GroupTable:
        groups, keys = group_rows(sample.columns[self.key])
        values = sample.target if self.numbers is None else self.numbers.of(sample)
        xp = array_module(groups, values)  # one of them may be on a GPU and the other not
        groups, values = xp.asarray(groups), xp.asarray(values)
        finite = xp.isfinite(values)
        cells = (groups.astype(np.int64) * self.folds + beside(self._folds(sample), groups))[finite]
        added = xp.asarray(self._added(sample, values))[finite]
        shape = len(keys) + 1, self.folds
        counts = _tally(cells, None, shape)
        if self.classes:
            labels = [added == np.float32(label) for label in range(self.classes)]
            totals = [Limb(0, np.stack([_tally(cells, label, shape) for label in labels], axis=-1))]
        else:
            totals = [
                Limb(part.exponent, part.digits[..., None]) for part in _tallies(cells, limbs(added), shape)
            ]
        squares = _tallies(cells, square_limbs(added), shape) if self.squares else None
        seen = np.append(np.flatnonzero(counts[:-1].any(axis=1)), len(keys))
        return GroupTable(
            keys.take(pa.array(seen[:-1])),
            counts[seen],
            Superaccumulator.of(totals, (*shape, self.classes or 1))[seen],
            None if squares is None else Superaccumulator.of(squares, shape)[seen],
            _ends(groups[finite], values[finite], shape[0])[seen] if self.ends else None,
        )

    def _added(self, sample: Sample, values: Any) -> Any:
        """Returns the values to sum: int64 as they are, where no step came between."""
        numbers = self.numbers
        if numbers is not None and numbers.encoding is None and numbers.kind == "int" and not numbers.steps:
            return sample.columns[numbers.column].values
        return values

    def _folds(self, sample: Sample) -> Any:
        if self.folds == 1:
            return np.zeros(len(sample), np.int64)
        assert sample.fold_ids is not None
        return folds_of(sample.fold_ids, self.folds)

    def merge(self, left: GroupTable, right: GroupTable) -> GroupTable:
        encoded = pa.concat_arrays([left.keys, right.keys]).dictionary_encode()
        places = encoded.indices.to_numpy()
        size = len(encoded.dictionary)
        # A key occurs once in each table.
        own = np.append(places[: len(left.keys)], size).astype(np.int64)
        other = np.append(places[len(left.keys) :], size).astype(np.int64)
        counts = np.zeros((size + 1, self.folds), np.int64)
        counts[own] += left.counts
        counts[other] += right.counts
        squares = ends = None
        if left.squares is not None and right.squares is not None:
            squares = left.squares.placed(own, size + 1) + right.squares.placed(other, size + 1)
        if left.ends is not None and right.ends is not None:
            ends = np.full((size + 1, 2), np.nan, np.float32)
            for table, rows in ((left.ends, own), (right.ends, other)):
                ends[rows, 0] = np.fmin(ends[rows, 0], table[:, 0])
                ends[rows, 1] = np.fmax(ends[rows, 1], table[:, 1])
        sums = left.sums.placed(own, size + 1) + right.sums.placed(other, size + 1)
        return GroupTable(encoded.dictionary, counts, sums, squares, ends)


def folds_of(fold_ids: npt.NDArray[np.int64], folds: int) -> npt.NDArray[np.int64]:
    """The fold of each row, by a hash of its id or its group's."""
    return (hash_ints(fold_ids) % np.uint32(folds)).astype(np.int64)


def _tallies(cells: Any, parts: Sequence[Limb], shape: tuple[int, int]) -> list[Limb]:
    return [Limb(part.exponent, _tally(cells, part.digits, shape)) for part in parts]


def _tally(cells: Any, digits: Any, shape: tuple[int, int]) -> Counts:
    """Sums the digits of each cell without rounding, on the host; None: counts them."""
    xp = array_module(cells)
    size = shape[0] * shape[1]
    total = xp.zeros(size, np.int64)
    for start in range(0, len(cells), _BLOCK):
        block = slice(start, start + _BLOCK)
        own = None if digits is None else digits[block].astype(np.float64, copy=False)
        total += tally(cells[block], size, own).astype(np.int64)
    return on_host(total).reshape(shape)


def _ends(groups: Any, values: Any, size: int) -> Floats:
    """The smallest and the largest value of each group, by sorting (group, value) as one integer."""
    ends = np.full((size, 2), np.nan, np.float32)
    if not len(values):
        return ends
    xp = array_module(groups, values)
    bits = xp.ascontiguousarray(values).view(np.uint32)
    bits = xp.where(bits == np.uint32(0x80000000), np.uint32(0), bits)  # -0 is 0
    keys = xp.where(bits >> np.uint32(31) != 0, ~bits, bits | np.uint32(0x80000000)).astype(np.uint64)
    ordered = xp.sort((groups.astype(np.uint64) << np.uint64(32)) | keys)
    starts = xp.searchsorted(ordered, xp.asarray(np.arange(size + 1, dtype=np.uint64) << np.uint64(32)))
    low, high = ordered[xp.minimum(starts[:-1], len(ordered) - 1)], ordered[xp.maximum(starts[1:] - 1, 0)]
    starts, low, high = (on_host(each) for each in (starts, low, high))
    seen = starts[1:] > starts[:-1]
    ends[seen] = np.stack([_values(low[seen]), _values(high[seen])], axis=1)
    return ends


def _values(keys: npt.NDArray[np.uint64]) -> Floats:
    own = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    bits = np.where(own & np.uint32(0x80000000) != 0, own ^ np.uint32(0x80000000), ~own)
    return bits.astype(np.uint32).view(np.float32)
