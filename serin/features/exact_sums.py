"""The sum of numbers and of their squares, as exact integers: the same from any cut into pieces and any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.features.column import array_module, count_true
from serin.features.counted import Counted
from serin.features.limbs import BLOCK, DIGIT_BITS, SMALLEST, Limb, limbs, square_limbs
from serin.features.number_requests import OfNumbers, block_rows
from serin.features.sample import Sample

Counts = npt.NDArray[np.int64]
SUM_EXPONENT, SQUARES_EXPONENT = SMALLEST, 2 * SMALLEST
_DIGIT_BITS = 38  # as many of them as a block has rows are added up in float64 without rounding


@dataclass(frozen=True, slots=True)
class Sums:
    """Of `count` finite values, in units of 2^SUM_EXPONENT and 2^SQUARES_EXPONENT."""

    count: int
    total: int
    squares: int

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.count + other.count, self.total + other.total, self.squares + other.squares)


@dataclass(frozen=True, slots=True)
class ExactSums(OfNumbers):
    """Infinite values take no part."""

    def measure(self, sample: Sample) -> Sums:
        sums = Sums(0, 0, 0)
        for values in self.numbers.blocks(sample, block_rows(sample, BLOCK)):
            sums += _sums(values, count_true(np.isfinite(values)))
        return sums

    def measure_counted(self, values: Counted) -> Sums:
        numbers = self._of_entries(values)
        finite = np.isfinite(numbers)
        counts = values.counts[finite]
        return _sums(numbers[finite], int(counts.sum()), counts)

    def merge(self, left: Sums, right: Sums) -> Sums:
        return left + right


def _sums(values: Any, count: int, counts: Counts | None = None) -> Sums:
    """Each value as often as `counts` says; infinite ones and NaN count as 0."""
    bits = _DIGIT_BITS if counts is None and array_module(values) is np else DIGIT_BITS
    parts, squares = limbs(values, most_bits=bits, digit_bits=bits), square_limbs(values, digit_bits=bits)
    return Sums(count, _added(parts, counts, SUM_EXPONENT), _added(squares, counts, SQUARES_EXPONENT))


def _added(parts: Sequence[Limb], counts: Counts | None, exponent: int) -> int:
    return sum(_weighed(part.digits, counts) << (part.exponent - exponent) for part in parts)


def _weighed(digits: Any, counts: Counts | None) -> int:
    if counts is None:
        return int(digits.sum() if array_module(digits) is np else digits.astype(np.int64).sum())
    if int(counts.sum()) < 2**31:
        return int(np.dot(digits.astype(np.int64), counts))
    return int(np.dot(digits.astype(np.int64).astype(object), counts.astype(object)))
