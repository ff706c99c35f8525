"""Which row stands at a rank when all are in order of (time, row id): found in few passes, over few of the pieces.

First every piece says between which times its rows lie. Where tables come in order of time, as most do, that leaves
a piece or two per rank to be looked into; else all are counted, in ranges that get narrower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from serin.etl.device import gpu_aware
from serin.etl.engine import Engine, Held
from serin.etl.relation import Prepared
from serin.features.column import count_true, on_host, tally

Int64 = npt.NDArray[np.int64]
_BINS = 2**16


class Extent(NamedTuple):
    """How many rows a piece has, and their earliest and latest time."""

    rows: int
    low: int
    high: int


class Range(NamedTuple):
    """Times from `start` on, 2^bits of them."""

    start: int
    bits: int

    def meets(self, extent: Extent) -> bool:
        return bool(extent.rows) and extent.high >= self.start and extent.low < self.start + (1 << self.bits)


def find_ranks(ranks: Sequence[int], engine: Engine, held: Held) -> list[tuple[int, int]]:
    """For each rank (0 is the first) the time and the id of the row that stands there."""
    extents: list[Extent] = engine.collect(time_extent, held)
    ranges = [_first_range(rank, extents) for rank in ranks]
    while any(each.bits for each in ranges):
        asked = _Asked.of(ranges, held, extents)
        counts = engine.reduce(count_times, np.add, asked.pieces, tuple(ranges))
        ranges = [
            _narrower(each, own, rank - asked.rows_before(each.start))
            for rank, each, own in zip(ranks, ranges, counts, strict=True)
        ]
    asked = _Asked.of(ranges, held, extents)
    moments = [each.start for each in ranges]
    ties = engine.collect(rows_at, asked.pieces, tuple(moments))
    found = []
    for index, (rank, moment) in enumerate(zip(ranks, moments, strict=True)):
        before = asked.rows_before(moment) + sum(part[index][0] for part in ties)
        tied = np.sort(np.concatenate([part[index][1] for part in ties]))
        found.append((moment, int(tied[rank - before])))
    return found


@dataclass(frozen=True, slots=True)
class _Asked:
    """The pieces that have rows in one of the ranges, and the extents of all others."""

    pieces: Held
    others: tuple[Extent, ...]

    @classmethod
    def of(cls, ranges: Sequence[Range], held: Held, extents: Sequence[Extent]) -> _Asked:
        met = [any(each.meets(extent) for each in ranges) for extent in extents]
        others = tuple(extent for extent, own in zip(extents, met, strict=True) if not own)
        return cls([piece for piece, own in zip(held, met, strict=True) if own], others)

    def rows_before(self, moment: int) -> int:
        """How many rows of the other pieces are before the start of a range."""
        return sum(each.rows for each in self.others if each.high < moment)


def _first_range(rank: int, extents: Sequence[Extent]) -> Range:
    """What the pieces' extents alone say about the time at a rank."""
    pieces = [each for each in extents if each.rows]
    low = max(own.low for own in pieces if sum(each.rows for each in pieces if each.low < own.low) <= rank)
    high = min(
        own.high for own in pieces if sum(each.rows for each in pieces if each.high <= own.high) > rank
    )
    return Range(low, (high - low).bit_length())


def _narrower(before: Range, counts: Int64, rank: int) -> Range:
    """The 65536th of the range where the rank is, counted from the first row of the pieces that were asked."""
    if before.bits == 0:
        return before
    ends = np.cumsum(counts[:_BINS])
    place = int(np.searchsorted(ends, rank - int(counts[_BINS]), side="right"))
    bits = max(0, before.bits - 16)
    return Range(before.start + (place << bits), bits)


@gpu_aware
def time_extent(prepared: Prepared) -> Extent:
    times = prepared.time
    assert times is not None
    return Extent(len(times), int(times.min()), int(times.max())) if len(times) else Extent(0, 0, 0)


@gpu_aware
def count_times(prepared: Prepared, ranges: Sequence[Range]) -> Int64:
    """For each range: how many times are in which 65536th of it, and at the end how many are before it."""
    times = prepared.time
    assert times is not None
    counts = np.zeros((len(ranges), _BINS + 1), np.int64)
    for index, (start, bits) in enumerate(ranges):
        if index and ranges[index] == ranges[0]:
            counts[index] = counts[0]
            continue
        counts[index, _BINS] = count_true(times < start)
        places = times.view(np.uint64) - np.uint64(start % 2**64)  # what is before the range comes out large
        if bits < 64:
            places = places[places < np.uint64(2**bits)]
        places = (places >> np.uint64(max(0, bits - 16))).view(np.int64)
        counts[index, :_BINS] = on_host(tally(places, _BINS))
    return counts


@gpu_aware
def rows_at(prepared: Prepared, moments: Sequence[int]) -> list[tuple[int, Int64]]:
    """For each moment: how many rows are before it, and the rows with exactly this time."""
    times = prepared.time
    assert times is not None
    return [(count_true(times < each), on_host(prepared.rows[times == each])) for each in moments]
