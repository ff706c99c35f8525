"""Finds the smallest tolerance at which the training period itself raises no alarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from serin.columns.column import Array
from serin.evidence import e_detector
from serin.formats.drift import BLOCK_S, LEAST_TOLERANCE, YEAR_S, Block

SAFETY: Final = 1.25
_LARGEST_KAPPA: Final = 8.0
_HALVINGS: Final = 6


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
