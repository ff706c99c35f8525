"""Exact order statistics of numbers that are spread over partitions, from counts of float bit patterns.

Every numeric step keeps the order of values, so the quantile after the steps is the result of the steps for the raw
quantile; and nulls that a fill gave a value rank among the raw values where that value would. So the raw counts serve
all steps. Infinite values are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from serin.errors import ColumnUnusable
from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.value_counts import HighBits, LowBits
from serin.features.fitted import NumericStep
from serin.features.numbers import Numbers, through

Counts = npt.NDArray[np.int64]
_INFINITE, _SIGN = 0x7F80, 0x8000
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Filled:
    """`count` nulls became `value` by step number `at`; the raw values from `key` on are not smaller."""

    value: float
    at: int
    count: int
    key: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distribution:
    numbers: Numbers  # with the steps fitted so far
    highs: Counts  # the upper halves of the sort keys of finite rows before any step, in order
    ends: Counts  # cumulative row counts, including each of them
    nulls: int
    filled: Filled | None = None
    lower: dict[int, Counts] = field(default_factory=dict)  # per upper half that was requested

    def after(self, step: NumericStep) -> Distribution:
        """Returns the distribution after one more step. The first step that fills nulls leaves none for a second."""
        numbers, value = self.numbers.after(step), step.null_becomes
        if value is None or self.filled is not None:
            return replace(self, numbers=numbers)
        filled = Filled(value, len(self.numbers.steps) + 1, self.nulls, self._first_key_not_below(value))
        return replace(self, numbers=numbers, filled=filled)

    def quantiles(self, shares: Sequence[float]) -> Fit[list[float]]:
        """Returns the result of the steps at rank floor(q * (n - 1)), for each q: values that occur. One pass, two
        after a fill."""
        count = int(self.ends[-1])
        below, more = count, 0
        if self.filled is not None:
            more = self.filled.count
            below = yield from self._below(self.filled.key)
        found: dict[int, float] = {}
        wanted = [math.floor(q * (count + more - 1)) for q in shares]
        raw = {
            rank: rank if rank < below else rank - more for rank in wanted if not below <= rank < below + more
        }
        values = yield from self._at(sorted(set(raw.values())))
        for rank in wanted:
            found[rank] = self.made_of(values[raw[rank]]) if rank in raw else self._made_of_fill()
        return [min(max(found[rank], -_LARGEST), _LARGEST) for rank in wanted]

    def made_of(self, raw: float) -> float:
        """Returns the result of the steps for a raw value; never -0."""
        return float(through(self.numbers.steps, np.asarray([raw], np.float32))[0]) + 0.0

    def _made_of_fill(self) -> float:
        assert self.filled is not None
        values = np.asarray([self.filled.value], np.float32)
        return float(through(self.numbers.steps[self.filled.at :], values)[0]) + 0.0

    def _at(self, ranks: Sequence[int]) -> Fit[dict[int, float]]:
        """The raw values at these ranks."""
        places = [int(np.searchsorted(self.ends, rank, side="right")) for rank in ranks]
        highs = [int(self.highs[place]) for place in places]
        yield from self._ask(highs)
        found = {}
        for rank, place, high in zip(ranks, places, highs, strict=True):
            before = int(self.ends[place - 1]) if place else 0
            lower = self._lower(high)
            used = np.flatnonzero(lower)
            low = int(used[np.searchsorted(np.cumsum(lower[used]), rank - before, side="right")])
            found[rank] = _from_key(high << 16 | low)
        return found

    def _below(self, key: int) -> Fit[int]:
        """How many rows have a smaller sort key."""
        high = key >> 16
        yield from self._ask([high])
        place = int(np.searchsorted(self.highs, high))
        before = int(self.ends[place - 1]) if place else 0
        return before + int(self._lower(high)[: key & 0xFFFF].sum())

    def _first_key_not_below(self, value: float) -> int:
        if not self.numbers.steps:
            return _to_key(value or -0.0)  # of the two zeros, -0 comes first
        low, high = _to_key(-_LARGEST), _to_key(_LARGEST) + 1
        while low < high:
            middle = (low + high) // 2
            if self.made_of(_from_key(middle)) >= value:
                high = middle
            else:
                low = middle + 1
        return low

    def _ask(self, highs: Sequence[int]) -> Fit[None]:
        missing = [bits for bits in dict.fromkeys(map(_bits_of_high, highs)) if bits not in self.lower]
        if missing:
            answers = yield tuple(LowBits(self.numbers.start, bits) for bits in missing)
            self.lower.update(zip(missing, answers, strict=True))

    def _lower(self, high: int) -> Counts:
        """Rows by the lower half of their sort key, among those whose key starts with `high`."""
        bits = _bits_of_high(high)
        counts = self.lower[bits]
        return counts[::-1] if bits & _SIGN else counts


def measure_distribution(numbers: Numbers) -> Fit[Distribution]:
    """The distribution of training rows; DataError when there is no value among them."""
    assert not numbers.steps
    upper: Counts = yield HighBits(numbers)
    highs, ends = order_of_values(upper)
    if not len(highs):
        raise ColumnUnusable(
            column=numbers.column,
            problem=f"column {numbers.column!r} has no value in the training split; remove it from the features, "
            "or fix the table",
        )
    return Distribution(numbers=numbers, highs=highs, ends=ends, nulls=count_nulls(upper))


def count_nulls(upper: Counts) -> int:
    """The rows whose upper halves are those of NaN."""
    return int(upper[_INFINITE + 1 : _SIGN].sum()) + int(upper[_SIGN + _INFINITE + 1 :].sum())


def _bits_of_high(high: int) -> int:
    return high ^ _SIGN if high & _SIGN else 0xFFFF - high


def order_of_values(counts: Counts) -> tuple[Counts, Counts]:
    """The finite upper halves that occur, as upper halves of sort keys in the order of values; and the rows up to and
    with each."""
    halves = np.flatnonzero(counts != 0)
    halves = halves[(halves & 0x7FFF) < _INFINITE]
    keys = np.where(halves & _SIGN, 0xFFFF - halves, halves | _SIGN)
    order = np.argsort(keys)
    return keys[order], np.cumsum(counts[halves[order]])


def _to_key(value: float) -> int:
    bits = int(np.float32(value).view(np.uint32))
    return bits ^ 0xFFFFFFFF if bits & 0x80000000 else bits | 0x80000000


def _from_key(key: int) -> float:
    bits = key ^ 0x80000000 if key & 0x80000000 else key ^ 0xFFFFFFFF
    return float(np.uint32(bits).view(np.float32))
