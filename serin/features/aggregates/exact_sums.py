"""The sum of numbers and of their squares, as exact integers: the result does not depend on partitioning or device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.columns.column import array_module, count_true
from serin.columns.limbs import BLOCK, SMALLEST, Limb, limbs, span_of, square_limbs
from serin.features.aggregates.aggregate import Counted
from serin.features.aggregates.value_counts import NumberAggregate, block_rows
from serin.features.sample import Sample

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
SUM_EXPONENT, SQUARES_EXPONENT = SMALLEST, 2 * SMALLEST
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


def _sums_of_block(values: Any, whole: Floats, squares: Floats, spare: Floats) -> Sums:
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


def _digits_added(whole: Floats, bits: int, spare: Floats) -> int:
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
