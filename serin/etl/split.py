"""Which rows train, which validate, which test: by time (ties by row id), or by a hash of the row id.

Both depend on the rows alone, never on how they are cut into pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt

from serin.etl.engine import Engine, Held
from serin.etl.relation import Prepared
from serin.features.murmur3 import hash_ints
from serin.formats.dataset import SPLITS
from serin.spec.data import SplitSpec

Int64 = npt.NDArray[np.int64]
Shares = tuple[Fraction, Fraction]  # up to the end of train, up to the end of valid


class SplitRule(Protocol):
    def place(self, rows: Int64, time: Int64 | None) -> npt.NDArray[np.uint8]:
        """For each row the position of its split in SPLITS."""
        ...


@dataclass(frozen=True, slots=True)
class HashSplit:
    """A row belongs where its hash falls in 0 .. 2^32."""

    ends: tuple[int, int]

    def place(self, rows: Int64, time: Int64 | None) -> npt.NDArray[np.uint8]:  # noqa: ARG002
        hashes = hash_ints(rows).astype(np.int64)
        return (hashes >= self.ends[0]).astype(np.uint8) + (hashes >= self.ends[1]).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """The first (time, row id) of valid and of test."""

    starts: tuple[tuple[int, int], tuple[int, int]]

    def place(self, rows: Int64, time: Int64 | None) -> npt.NDArray[np.uint8]:
        assert time is not None
        place = np.zeros(len(rows), np.uint8)
        for moment, row in self.starts:
            place += (time > moment) | ((time == moment) & (rows >= row))
        return place


def hash_split(split: SplitSpec) -> HashSplit:
    first, second = _shares(split)
    return HashSplit((math.floor(first * 2**32), math.floor(second * 2**32)))


def time_split(split: SplitSpec, engine: Engine, held: Held, total: int) -> TimeSplit:
    """Cuts the rows in order of (time, row id) by their number: the earliest train, the latest test."""
    ranks = [min(total - 1, math.floor(share * total + Fraction(1, 2))) for share in _shares(split)]
    found = [_Search(rank) for rank in ranks]
    for digit in (3, 2, 1, 0):
        counts = engine.reduce(count_digits, np.add, held, tuple(search.prefix for search in found), digit)
        for search, own in zip(found, counts, strict=True):
            search.descend(own)
    moments = [search.moment() for search in found]
    ties = engine.collect(rows_at, held, tuple(moments))
    starts = []
    for index, (search, moment) in enumerate(zip(found, moments, strict=True)):
        tied = np.sort(np.concatenate([part[index] for part in ties]))
        starts.append((moment, int(tied[search.rank])))
    return TimeSplit((starts[0], starts[1]))


def count_digits(prepared: Prepared, prefixes: Sequence[int], digit: int) -> Int64:
    """For each prefix (the upper digits, 16 bits each): how many times that start with it have which next digit."""
    assert prepared.time is not None
    keys = prepared.time.view(np.uint64) ^ np.uint64(2**63)  # order of times = order of keys
    counts = np.zeros((len(prefixes), 65536), np.int64)
    for index, prefix in enumerate(prefixes):
        if index and prefix == prefixes[0]:
            counts[index] = counts[0]
            continue
        chosen = keys if digit == 3 else keys[(keys >> np.uint64(16 * (digit + 1))) == np.uint64(prefix)]
        digits = (chosen >> np.uint64(16 * digit)).astype(np.uint16)
        counts[index] = np.bincount(digits, minlength=65536)
    return counts


def rows_at(prepared: Prepared, moments: Sequence[int]) -> list[Int64]:
    """The rows with exactly these times."""
    return [prepared.rows[prepared.time == moment] for moment in moments]


class _Search:
    """The time at a rank, found digit by digit; then `rank` counts among the rows with that time."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.prefix = 0

    def descend(self, counts: Int64) -> None:
        ends = np.cumsum(counts)
        digit = int(np.searchsorted(ends, self.rank, side="right"))
        self.rank -= int(ends[digit - 1]) if digit else 0
        self.prefix = self.prefix << 16 | digit

    def moment(self) -> int:
        return self.prefix - 2**63


def _shares(split: SplitSpec) -> Shares:
    """Decimal shares as they were written: 0.8 is four fifths."""
    train, valid = Fraction(str(split.train)), Fraction(str(split.valid))
    return train, train + valid


assert len(SPLITS) == 3
