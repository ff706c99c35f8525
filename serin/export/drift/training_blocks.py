"""Cuts the training period into blocks of time, chooses the block over which the shares of a column are taken, and
finds the smallest tolerance at which the training period itself raises no alarm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from serin.columns.column import Array
from serin.evidence import e_detector
from serin.formats.drift import BLOCK_S, FEWEST_ROWS, LEAST_TOLERANCE, SHORTEST, YEAR_S, BinnedColumn, Block

WEEK_S, DAY_S = BLOCK_S["week"], BLOCK_S["day"]
NEARLY_EMPTY = 0.01  # a bin that is never larger is within every tolerance
_UNCORRELATED = 0.1
_SHORT: Sequence[Block] = (SHORTEST, "minute", "hour")
DAY_SEEN_S = 3 * 3600.0  # blocks of at most this length show a daily pattern
_NEIGHBOURS = 24  # blocks over which a local mean is taken
SAFETY: Final = 1.25
_LARGEST_KAPPA: Final = 8.0
_HALVINGS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """The rows of a series in blocks of one length. `block`: of each row. `rows`: of each block. `week`: of each
    block. `lasts`: seconds from the beginning of each block to that of the next. `filled`: whether blocks of this
    length usually have enough rows by themselves."""

    block: Array
    rows: Array
    week: Array
    lasts: Array
    filled: bool

    def shares(self, codes: Array, bins: int) -> Array:
        """float64[blocks, bins]."""
        size = len(self.rows)
        counts = np.bincount(self.block * bins + codes, minlength=size * bins).reshape(size, bins)
        return counts / self.rows[:, None]


def cut_time(times: Array, name: Block, origin: float) -> Cut:
    """Cuts rows, in the order of time, into blocks of this length; neighbours with few rows become one."""
    length, fewest = BLOCK_S[name], FEWEST_ROWS[name]
    moments, place, counts = np.unique(
        np.floor((times - origin) / length).astype(np.int64), return_inverse=True, return_counts=True
    )
    total = np.cumsum(counts)
    starts = [0]
    while starts[-1] < len(counts):
        before = total[starts[-1] - 1] if starts[-1] else 0
        starts.append(int(np.searchsorted(total, before + fewest)) + 1)
    if len(starts) > 2 and total[-1] - (total[starts[-2] - 1] if starts[-2] else 0) < fewest:
        del starts[-2]  # the last block is too small
    block_of_moment = np.searchsorted(np.asarray(starts[1:]), np.arange(len(counts)), side="right")
    block_of_moment = np.minimum(block_of_moment, len(starts) - 2)
    block = block_of_moment[place.reshape(-1)]
    first = np.asarray(starts[:-1])
    week = np.floor(moments[first] * length / WEEK_S).astype(np.int64)
    begins = np.append(moments[first], moments[-1] + 1) * length
    return Cut(
        block=block,
        rows=np.bincount(block),
        week=week,
        lasts=np.diff(begins),
        filled=bool(np.median(counts) >= FEWEST_ROWS["hour"]),
    )


def cut_evenly(rows: int) -> Cut:
    """Blocks of equally many rows in the order of the table, for data without a time."""
    each = FEWEST_ROWS["day"]
    block = np.minimum(np.arange(rows) // each, max(rows // each - 1, 0))
    size = int(block[-1]) + 1
    return Cut(
        block=block,
        rows=np.bincount(block),
        week=np.zeros(size, np.int64),
        lasts=np.full(size, BLOCK_S[SHORTEST]),
        filled=False,
    )


def choose_block(shares: Mapping[Block, Array], cuts: Mapping[Block, Cut]) -> Block:
    """The block of a series: the shortest at which the shares of no bin are correlated within a week, nor those of
    longer ones; else a day, or a week when a day has too few rows. Bins share it: where one follows a slow state or a
    client that repeats itself, the others may."""
    usable = [name for name in _SHORT if cuts[name].filled and cuts["day"].filled]
    free = {name: bool(_uncorrelated(shares[name], cuts[name], BLOCK_S[name]).all()) for name in usable}
    for at, name in enumerate(usable):
        if all(free[other] for other in usable[at:]):
            return name
    return "day" if cuts["day"].filled else "week"


def local_means(shares: Array) -> tuple[Array, Array]:
    """The smallest and the largest mean of a few neighbouring blocks, of each bin."""
    width = min(_NEIGHBOURS, len(shares))
    total = np.cumsum(np.concatenate([np.zeros((1, shares.shape[1])), shares]), axis=0)
    means = (total[width:] - total[:-width]) / width
    return means.min(axis=0), means.max(axis=0)


def blocks_of(column: BinnedColumn, shares: Array, block: Block) -> list[Block]:
    """The block of each bin. Values that are missing or were never seen, where training had nearly none, have the
    shortest: they come from a fault, not from a slow state of the world. Numbers out of range may come from one."""
    faults = fault_bins(column)
    largest = local_means(shares)[1]
    return [
        SHORTEST if place in faults and largest[place] <= NEARLY_EMPTY else block
        for place in range(column.bins)
    ]


def fault_bins(column: BinnedColumn) -> set[int]:
    return {column.bins - 1, *([column.bins - 2] if column.kind == "category" else [])}


def longer(one: Block, other: Block) -> Block:
    return one if BLOCK_S[one] >= BLOCK_S[other] else other


def _uncorrelated(shares: Array, cut: Cut, length: float) -> Array:
    """Whether successive shares of each bin, and those a day apart, are uncorrelated within a week."""
    rest = _within_week(shares, cut)
    free = np.ones(shares.shape[1], bool)
    for lag in {1, max(1, round(DAY_S / length))}:
        if len(rest) > 2 * lag:
            both = (rest[lag:] * rest[:-lag]).sum(axis=0) / np.maximum((rest**2).sum(axis=0), 1e-12)
            free &= np.abs(both) < _UNCORRELATED
    return free


def _within_week(shares: Array, cut: Cut) -> Array:
    """The difference of each block's shares from the mean of its week."""
    week = cut.week - cut.week.min()
    size = np.bincount(week)
    sums = np.stack([np.bincount(week, weights=column) for column in shares.T], axis=1)
    rest: Array = shares - (sums / np.maximum(size, 1)[:, None])[week]
    return rest


def weekly_deviation(shares: Array, cut: Cut, weeks: int) -> Array:
    """The largest deviation of a complete week's mean share from the mean, of each bin."""
    mean = shares.mean(axis=0)
    found = [
        np.abs(shares[cut.week == week].mean(axis=0) - mean)
        for week in range(weeks)
        if (cut.week == week).any()
    ]
    return np.max(found, axis=0) if found else np.zeros(shares.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """A series' training shares per bin, each at its own block: what `worst_evidence` replays. `deviation`: how far the
    mean may be from the training mean, before the factor kappa; of what bets on "more" and on "less" count in a quick
    series. `apart`: bins that hold what training has hardly."""

    shares: Sequence[
        tuple[Block, Array, Array, Array]
    ]  # block, its bins, float64[blocks, those bins], seconds
    expected: e_detector.Expected
    deviation: Array | tuple[Array, Array]
    apart: Array

    def claim(self, kappa: float) -> tuple[e_detector.Expected, Array]:
        """What is expected of the bins, and its tolerance."""
        if not isinstance(self.deviation, tuple):
            return self.expected, np.maximum(LEAST_TOLERANCE, kappa * self.deviation)
        more, less = (np.maximum(kappa * each - LEAST_TOLERANCE, 0.0) for each in self.deviation)
        floored, capped = self.expected.floored + more, np.maximum(self.expected.capped - less, 0.0)
        return replace(self.expected, floored=floored, capped=capped), np.full(len(more), LEAST_TOLERANCE)


def smallest_kappa(replay: Replay, threshold: float) -> float:
    """The smallest factor, from 1 on, at which the replay stays below the threshold (in years), times the safety."""

    def alarms(kappa: float) -> bool:
        return worst_evidence(replay, *replay.claim(kappa)) >= threshold

    return SAFETY * _smallest(lambda kappa: not alarms(kappa))


def _smallest(holds: Callable[[float], bool]) -> float:
    low, high = 1.0, 1.0
    while not holds(high):
        if high >= _LARGEST_KAPPA:
            return high
        low, high = high, high * 2
    if high == 1.0:
        return 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def worst_evidence(replay: Replay, expected: e_detector.Expected, tolerance: Array) -> float:
    """The largest evidence of a series over the training period, in years: at most the sum of what the bins with each
    length of block reach. A product of factors from block s to t is exp(C[t] - C[s - 1])."""
    who = e_detector.bettors(expected, tolerance)
    part = e_detector.weights(who, np.zeros(len(who), np.int64), replay.apart)
    worst = 0.0
    for block, bins, shares, lasts in replay.shares:
        own = np.flatnonzero(np.isin(who.bin, bins))
        if not len(own) or not len(shares):
            continue
        column = np.searchsorted(bins, who.bin[own])
        factors = e_detector.log_factors(who, own, shares[:, column])
        total = np.cumsum(factors, axis=0)
        before = np.concatenate([np.zeros((1, *total.shape[1:])), total[:-1]])
        waited = e_detector.waited(lasts, BLOCK_S[block])
        log_m = total + np.logaddexp.accumulate(np.log(waited)[:, None, None] - before, axis=0)
        reached = np.exp(np.minimum(log_m, 600.0)).mean(axis=2) @ part[own]
        worst += float(reached.max()) * BLOCK_S[block] / YEAR_S
    return worst
