"""The peers' decisions on the same requests: Flagger's loop, Kayenta's judge, and a bet on each single request.

Each uses p95 alone, its natural metric. All runs are computed at once; a decision is the second of the rollback.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.rollout.scenarios import MARGIN, Array

P95 = 0.95
MINUTE_S = 60


def undecided(runs: int) -> Array:
    return np.full(runs, np.inf)


class Flagger:
    """Each minute: is the candidate's p95 below a threshold? The fifth failed check in total rolls back at the next
    tick.

    The threshold is chosen well: stable's p95 when the rollout begins, plus the margin. A minute without data is a
    failed check.
    """

    CHECKS = 5

    def __init__(self, runs: int, threshold_ms: float) -> None:
        self._failed = np.zeros(runs, dtype=int)
        self._threshold = threshold_ms
        self.decided = undecided(runs)

    def minute(self, second: int, candidate_ms: Array, _control_ms: Array) -> None:
        ripe = (self._failed >= self.CHECKS) & np.isinf(self.decided)
        self.decided[ripe] = second
        self._failed += ~(candidate_ms <= self._threshold)


class Kayenta:
    """Each minute, with one point per arm and minute so far: Mann-Whitney with a 98% interval for the shift.

    The result is High, and the score below 75, when the interval's lower end exceeds a quarter of the Hodges-Lehmann
    shift and the ratio of the means reaches the allowed effect.
    """

    Z_98 = 2.3263

    def __init__(self, runs: int) -> None:
        self._candidate: list[Array] = []
        self._control: list[Array] = []
        self.decided = undecided(runs)

    def minute(self, second: int, candidate_ms: Array, control_ms: Array) -> None:
        self._candidate.append(candidate_ms)
        self._control.append(control_ms)
        n = len(self._candidate)
        rank = self._rank(n)
        going = np.flatnonzero(np.isinf(self.decided))
        if rank < 1 or not going.size:
            return
        candidate = np.array(self._candidate)[:, going].T
        control = np.array(self._control)[:, going].T
        shifts = np.sort((candidate[:, :, None] - control[:, None, :]).reshape(len(going), -1), axis=1)
        lower, shift = shifts[:, rank - 1], np.median(shifts, axis=1)
        ratio = candidate.mean(axis=1) / control.mean(axis=1)
        high = (lower > 0.25 * np.abs(shift)) & (shift > 0) & (ratio >= 1 + MARGIN)
        self.decided[going[high]] = second

    @classmethod
    def _rank(cls, n: int) -> int:
        """Returns the rank of the interval's lower end among the sorted differences, exact for few points; 0: none
        yet."""
        if n <= 8:
            ways, target = _rank_sums(n), 0.01
            below = np.cumsum(ways) / ways.sum()
            return int((below <= target).sum())
        return math.floor(n * n / 2 - cls.Z_98 * math.sqrt(n * n * (2 * n + 1) / 12))


def _rank_sums(n: int) -> Array:
    """Counts the orders of two samples of n in which the statistic U is 0, 1, 2 ..."""
    ways = np.zeros((n + 1, n * n + 1))
    ways[0, 0] = 1
    for item in range(1, 2 * n + 1):
        for taken in range(min(item, n), 0, -1):
            for extra in range(n * n, -1, -1):
                before = extra - (item - taken)
                if before >= 0:
                    ways[taken, extra] += ways[taken - 1, before]
    return ways[n]


class PerRequest:
    """Bets on each request slower than the limit: is it the candidate's more often than the weights say?

    This is exact only when requests are independent of each other, which the benchmark demonstrates.
    """

    RATIOS = np.array((1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0))

    def __init__(self, runs: int, alpha: float) -> None:
        self._owned = np.zeros((runs, len(self.RATIOS)))
        self._needed = 1 / alpha
        self.decided = undecided(runs)

    def block(self, second: int, candidate_slow: Array, stable_slow: Array, share: float) -> None:
        odds = self.RATIOS * share
        bet = odds / (odds + 1 - share)
        self._owned += candidate_slow[:, None] * np.log(bet / share)
        self._owned += stable_slow[:, None] * np.log((1 - bet) / (1 - share))
        e_value = np.exp(np.minimum(self._owned, 600)).mean(axis=1)
        self.decided[np.isinf(self.decided) & (e_value >= self._needed)] = second
