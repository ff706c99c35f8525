"""Which rows train, which validate, which test: by time (ties by row id), by group, class by class, or by row id.

All depend on the rows alone, never on how they are cut into pieces.

A split by time finds the row at a rank in the order of (time, row id), in few passes over few of the pieces. First
every piece reports its earliest and latest time. Where tables are in order of time, as most are, that leaves a piece or
two per rank to read; else all are counted, in ranges that get narrower.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from serin.columns.column import beside, count_true, on_host, tally
from serin.columns.hashing import hash_ints
from serin.etl.engines.device import gpu_aware
from serin.etl.engines.engine import Engine, Held
from serin.etl.relational.relation import Prepared
from serin.etl.relational.target import Class
from serin.formats.dataset import SPLITS
from serin.spec.data import DataSpec
from serin.spec.split import SplitSpec

Int64 = npt.NDArray[np.int64]
Labels = npt.NDArray[np.float32]
LEFT_OUT = 3
logger = logging.getLogger(__name__)

_ANY_ZONE_S = 86_400.0  # times may be local
_BINS = 2**16
FEW_ROWS = 2**21  # that are collected here; more are counted first
Shares = tuple[Fraction, Fraction]  # up to the end of train, up to the end of valid


class SplitRule(Protocol):
    def place(self, prepared: Prepared, labels: Labels) -> npt.NDArray[np.uint8]:
        """For each row the position of its split in SPLITS, or LEFT_OUT."""
        ...


@dataclass(frozen=True, slots=True)
class HashSplit:
    """A row belongs where its hash, or its group's, falls in 0 .. 2^32."""

    ends: tuple[int, int]
    by_group: bool = False

    def place(self, prepared: Prepared, labels: Labels) -> npt.NDArray[np.uint8]:  # noqa: ARG002
        hashes = prepared.group if self.by_group else hash_ints(prepared.rows)
        assert hashes is not None
        return _places(hashes.astype(np.int64), *self.ends)


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """The first (time, row id) of valid and of test. Rows less than `gap_us` before one of them are left out."""

    starts: tuple[tuple[int, int], tuple[int, int]]
    gap_us: int = 0

    def place(self, prepared: Prepared, labels: Labels) -> npt.NDArray[np.uint8]:  # noqa: ARG002
        rows, time = prepared.rows, prepared.time
        assert time is not None
        place = np.zeros_like(time, dtype=np.uint8)
        first, last = (time.min(), time.max()) if len(time) else (0, 0)
        for moment, row in self.starts:
            if first > moment:
                place += np.uint8(1)
            elif last >= moment:  # else all are before it
                place += ((time > moment) | ((time == moment) & (rows >= row))).view(np.uint8)
        if self.gap_us:
            close = [
                (place == split) & (time > moment - self.gap_us)
                for split, (moment, _) in enumerate(self.starts)
            ]
            place[close[0] | close[1]] = LEFT_OUT
        return place


@dataclass(frozen=True, slots=True, eq=False)
class StratifiedSplit:
    """For each class the hashes at which valid and test begin."""

    ends: Int64  # [2, classes]

    def place(self, prepared: Prepared, labels: Labels) -> npt.NDArray[np.uint8]:
        own = labels.astype(np.int64)
        first, second = (beside(ends, own)[own] for ends in self.ends)
        return _places(hash_ints(prepared.rows).astype(np.int64), first, second)


def split_rule(data: DataSpec, engine: Engine, held: Held, total: int, classes: Sequence[Class]) -> SplitRule:
    """The rule of the spec's split over all the rows held."""
    match data.split_kind:
        case "temporal":
            return time_split(data.split, engine, held, total)
        case "stratified":
            return stratified_split(data.split, engine, held, classes)
        case "group":
            return hash_split(data.split, by_group=True)
        case "random":
            return hash_split(data.split)


def time_split(split: SplitSpec, engine: Engine, held: Held, total: int) -> TimeSplit:
    """Cuts the rows in order of (time, row id) by their number: the earliest train, the latest test."""
    ranks = [min(total - 1, math.floor(share * total + Fraction(1, 2))) for share in _shares(split)]
    valid, test = find_ranks(ranks, engine, held)
    return TimeSplit((valid, test), round(split.gap * 1_000_000))


def hash_split(split: SplitSpec, *, by_group: bool = False) -> HashSplit:
    first, second = _shares(split)
    return HashSplit((math.floor(first * 2**32), math.floor(second * 2**32)), by_group)


def stratified_split(
    split: SplitSpec, engine: Engine, held: Held, classes: Sequence[Class]
) -> StratifiedSplit:
    """Cuts the rows of each class, in order of their hash, by their number."""
    prefixes = np.zeros((2, max(2, len(classes))), np.int64)
    ranks: Int64 | None = None
    for digit in (3, 2, 1, 0):
        counts = engine.reduce(count_strata, np.add, held, prefixes, digit, tuple(classes))
        if ranks is None:
            rows = [int(number) for number in counts[0].sum(axis=-1)]
            ranks = np.asarray([[math.floor(share * each) for each in rows] for share in _shares(split)])
        ends = np.cumsum(counts, axis=-1)
        found = np.minimum((ends <= ranks[..., None]).sum(axis=-1), 255)
        before = np.take_along_axis(ends - counts, found[..., None], axis=-1)[..., 0]
        ranks, prefixes = ranks - before, prefixes << 8 | found
    return StratifiedSplit(prefixes)


@gpu_aware
def count_strata(prepared: Prepared, prefixes: Int64, digit: int, classes: Sequence[Class]) -> Int64:
    """For each boundary and class: how many hashes that start with its prefix have which next 8 bits."""
    labels = prepared.target.coded(classes).astype(np.int64)
    hashes = hash_ints(prepared.rows).astype(np.int64)
    size = prefixes.shape[1]
    counts = np.zeros((2, size, 256), np.int64)
    for boundary in range(2):
        chosen = (hashes >> (8 * (digit + 1))) == beside(prefixes[boundary], labels)[labels]
        places = labels[chosen] * 256 + ((hashes[chosen] >> (8 * digit)) & 255)
        counts[boundary] = on_host(tally(places, size * 256)).reshape(size, 256)
    return counts


def _places(hashes: Int64, first: int | Int64, second: int | Int64) -> npt.NDArray[np.uint8]:
    return (hashes >= first).astype(np.uint8) + (hashes >= second).astype(np.uint8)


def _shares(split: SplitSpec) -> Shares:
    """Decimal shares as they were written: 0.8 is four fifths."""
    train, valid = Fraction(str(split.train)), Fraction(str(split.valid))
    return train, train + valid


class Extent(NamedTuple):
    """How many rows a piece has, and their earliest and latest time."""

    rows: int
    low: int
    high: int


class Inside(NamedTuple):
    """Of one piece and range: how many rows are before it, and the times and ids of those inside."""

    before: int
    times: Int64
    rows: Int64


class Range(NamedTuple):
    """Times from `start` on, 2^bits of them."""

    start: int
    bits: int

    @property
    def end(self) -> int:
        return self.start + (1 << self.bits)

    def meets(self, extent: Extent) -> bool:
        return bool(extent.rows) and extent.high >= self.start and extent.low < self.end


def future_warning(latest_us: int) -> str | None:
    """Returns a sentence when a time, in microseconds since 1970 UTC, is more than a day from now."""
    if latest_us / 1e6 <= time.time() + _ANY_ZONE_S:
        return None
    shown = np.datetime64(latest_us, "us").astype("datetime64[s]")
    return (
        f"data.time has times in the future: the latest row is of {shown}, and the latest rows are the test rows; "
        "is it the time of the rows, and are its formats right (data.tables.NAME.date_formats)?"
    )


def find_ranks(ranks: Sequence[int], engine: Engine, held: Held) -> list[tuple[int, int]]:
    """Returns for each rank (0 is the first) the time and the id of its row."""
    extents: list[Extent] = engine.collect(time_extent, held)
    warning = future_warning(max((each.high for each in extents if each.rows), default=0))
    if warning is not None:
        logger.warning(warning)
    ranges = [_first_range(rank, extents) for rank in ranks]
    asked = _Asked.of(ranges, held, extents)
    rows = asked.rows
    while rows > FEW_ROWS and any(each.bits for each in ranges):
        counts = engine.reduce(count_times, np.add, asked.pieces, tuple(ranges))
        narrower = [
            _narrower(each, own, rank - asked.rows_before(each.start))
            for rank, each, own in zip(ranks, ranges, counts, strict=True)
        ]
        ranges, rows = [each for each, _ in narrower], sum(count for _, count in narrower)
        asked = _Asked.of(ranges, held, extents)
    parts = engine.collect(rows_in, asked.pieces, tuple(ranges))
    return [
        _at(rank - asked.rows_before(each.start), [part[index] for part in parts])
        for index, (rank, each) in enumerate(zip(ranks, ranges, strict=True))
    ]


def _at(rank: int, parts: Sequence[Inside]) -> tuple[int, int]:
    """The time and the id at a rank, counted from the first row of the pieces that were asked."""
    times = np.concatenate([part.times for part in parts])
    rank -= sum(part.before for part in parts)
    in_order = not (times[1:] < times[:-1]).any()
    moment = times[rank] if in_order else np.partition(times, rank)[rank]
    tied = np.sort(np.concatenate([part.rows for part in parts])[times == moment])
    return int(moment), int(tied[rank - np.count_nonzero(times < moment)])


@dataclass(frozen=True, slots=True)
class _Asked:
    """The pieces that have rows in one of the ranges, and the extents of all others."""

    pieces: Held
    rows: int  # of these pieces
    others: tuple[Extent, ...]

    @classmethod
    def of(cls, ranges: Sequence[Range], held: Held, extents: Sequence[Extent]) -> _Asked:
        met = [any(each.meets(extent) for each in ranges) for extent in extents]
        others = tuple(extent for extent, own in zip(extents, met, strict=True) if not own)
        rows = sum(extent.rows for extent, own in zip(extents, met, strict=True) if own)
        return cls([piece for piece, own in zip(held, met, strict=True) if own], rows, others)

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


def _narrower(before: Range, counts: Int64, rank: int) -> tuple[Range, int]:
    """The 65536th of the range where the rank is, counted from the first row of the pieces that were asked; and how
    many rows are in it."""
    ends = np.cumsum(counts[:_BINS])
    place = int(np.searchsorted(ends, rank - int(counts[_BINS]), side="right"))
    bits = max(0, before.bits - 16)
    return Range(before.start + (place << bits), bits), int(counts[place])


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
        places = places[places < np.uint64(2**bits)] if bits < 64 else places[times >= start]
        places = (places >> np.uint64(max(0, bits - 16))).view(np.int64)
        counts[index, :_BINS] = on_host(tally(places, _BINS))
    return counts


@gpu_aware
def rows_in(prepared: Prepared, ranges: Sequence[Range]) -> list[Inside]:
    """For each range how many rows are before it, and the times and ids of those inside."""
    times = prepared.time
    assert times is not None
    found = []
    extent = time_extent(prepared)
    for each in ranges:
        before, inside = 0, cast("Any", slice(0, 0))
        if not each.meets(extent):
            before = extent.rows if extent.high < each.start else 0
        elif extent.low >= each.start and extent.high < each.end:
            inside = slice(None)
        else:
            before = count_true(times < each.start)
            last = min(each.end - 1, 2**63 - 1)
            inside = np.flatnonzero((times >= each.start) & (times <= last))
        found.append(Inside(before, on_host(times[inside]), on_host(prepared.rows[inside])))
    return found


assert len(SPLITS) == 3
