"""Which rows train, which validate, which test: by time (ties by row id), by group, class by class, or by row id.

All depend on the rows alone, never on how they are cut into pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt

from serin.columns.column import beside, on_host, tally
from serin.columns.hashing import hash_ints
from serin.etl.dataset.time_ranks import find_ranks
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


assert len(SPLITS) == 3
