"""Exact order statistics of a column that is spread over partitions, from counts of float bit patterns.

Every numeric step keeps the order of values, so the quantile of what the steps made is what the steps make of the raw
quantile; and a fill puts the nulls at the place of the raw value it was taken from. So the raw counts serve all steps.
Infinite values take no part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from serin.errors import DataError
from serin.features.requests import Fit, HighBits, LowBits
from serin.features.steps import NumericStep

Counts = npt.NDArray[np.int64]
_INFINITE, _SIGN = 0x7F80, 0x8000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distribution:
    column: str
    steps: tuple[NumericStep, ...]  # fitted so far
    upper: Counts  # rows by upper 16 bits, by the bits as they are
    nulls: int
    filled: tuple[float, int] | None = None  # the raw value at which the filled nulls count, and their number
    lower: dict[int, Counts] = field(default_factory=dict)  # per upper half that was asked for

    def after(self, step: NumericStep) -> Distribution:
        return replace(self, steps=(*self.steps, step))

    def quantile(self, q: float) -> Fit[float]:
        """The raw value at rank floor(q * (n - 1)): always one that occurs. `made_of` applies the steps."""
        present = self._present()
        count = int(present.sum())
        if self.filled is None:
            return (yield from self._at(math.floor(q * (count - 1))))
        value, more = self.filled
        rank = math.floor(q * (count + more - 1))
        below = yield from self._below(value)
        if below <= rank < below + more:
            return value
        return (yield from self._at(rank if rank < below else rank - more))

    def made_of(self, raw: float) -> float:
        values = np.asarray([raw], np.float32)
        for step in self.steps:
            values = step.transform(values)
        return float(values[0])

    def exponent(self) -> int:
        """e such that every finite value, after the steps, is at most 2^e in magnitude."""
        keys = np.flatnonzero(self._present())
        ends = [_from_key(int(keys[0]) << 16), _from_key((int(keys[-1]) << 16) | 0xFFFF)]
        largest = max(abs(self.made_of(end)) for end in ends)
        return math.frexp(largest)[1]

    def _present(self) -> Counts:
        """Finite rows by the upper half of their sort key."""
        finite = (np.arange(65536) & 0x7FFF) < _INFINITE
        return _by_key(np.where(finite, self.upper, 0))

    def _at(self, rank: int) -> Fit[float]:
        ends = np.cumsum(self._present())
        high = int(np.searchsorted(ends, rank, side="right"))
        before = int(ends[high - 1]) if high else 0
        low_ends = np.cumsum((yield from self._lower(high)))
        low = int(np.searchsorted(low_ends, rank - before, side="right"))
        return _from_key(high << 16 | low)

    def _below(self, value: float) -> Fit[int]:
        key = _to_key(value)
        low = yield from self._lower(key >> 16)
        return int(self._present()[: key >> 16].sum()) + int(low[: key & 0xFFFF].sum())

    def _lower(self, high: int) -> Fit[Counts]:
        """Rows by the lower half of their sort key, among those whose key starts with `high`."""
        bits = high ^ _SIGN if high & _SIGN else 0xFFFF - high
        if bits not in self.lower:
            self.lower[bits] = yield LowBits(self.column, bits)
        counts = self.lower[bits]
        return counts[::-1] if bits & _SIGN else counts


def measure_distribution(column: str) -> Fit[Distribution]:
    """The distribution of a column's training rows; DataError when there is no value among them."""
    upper: Counts = yield HighBits(column)
    halves = np.arange(65536) & 0x7FFF
    nulls = int(upper[halves > _INFINITE].sum())
    if not upper[halves < _INFINITE].any():
        raise DataError(
            f"column {column!r} holds no value in the training split; take it out of the features, or mend the table",
            column=column,
        )
    return Distribution(column=column, steps=(), upper=upper, nulls=nulls)


def _by_key(counts: Counts) -> Counts:
    """From bit order to the order of values: negative ones first, the largest magnitude in front."""
    return np.concatenate([counts[_SIGN:][::-1], counts[:_SIGN]])


def _to_key(value: float) -> int:
    bits = int(np.float32(value).view(np.uint32))
    return bits ^ 0xFFFFFFFF if bits & 0x80000000 else bits | 0x80000000


def _from_key(key: int) -> float:
    bits = key ^ 0x80000000 if key & 0x80000000 else key ^ 0xFFFFFFFF
    return float(np.uint32(bits).view(np.float32))
