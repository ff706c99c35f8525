"""E-detectors: evidence that the shares of bins have left their tolerance at some unknown time. Pure.

The claim: in every block, given the past, the mean share of a bin is within its tolerance of the training share. A
bettor multiplies by a factor whose mean is at most 1 while the claim holds. The Shiryaev-Roberts statistic
M = (1 + M) x factor sums the wealth of one bettor started at each block, so it finds a change after any length of time
without one. After t blocks its mean is at most t: if an alarm needs M >= c, the mean number of blocks until a false
alarm is at least c. Means of such statistics, in units of time, keep the promise however they depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

STAKES: Final = np.array((0.1, 0.2, 0.4, 0.6, 0.8, 0.95))  # of the largest stake that cannot be ruined
_TRACKED: Final = 2  # the stake whose latest restart says since when


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bettors:
    """One bettor per bin and direction that can win; the stakes run side by side. `sign`: 1 for "more", -1 for "less".
    `limit`: the share from which it wins. `cap`: a larger share counts as this. `stakes`: [bettors, stakes]."""

    bin: Array
    sign: Array
    limit: Array
    cap: Array
    stakes: Array

    def __len__(self) -> int:
        return len(self.bin)


@dataclass(slots=True, kw_only=True, eq=False)
class Evidence:
    """`log_m`: float32[bettors, stakes], the logarithm of M. The others follow the tracked stake since its latest
    restart: `run` its log wealth, `since` the time of the restart, `hits` and `rows` what came after it."""

    log_m: Array
    run: Array
    since: Array
    hits: Array
    rows: Array


def bettors(share: Array, cap: Array, capped: Array, tolerance: Array) -> Bettors:
    """The bettors for bins with these training shares. "Less" is bet on shares that count as at most `cap`; their mean
    in training is `capped`. A smaller cap allows a larger stake."""
    more = np.flatnonzero(share + tolerance < 1)
    less = np.flatnonzero(capped - tolerance > 0)
    sign = np.repeat([1.0, -1.0], [len(more), len(less)])
    limit = np.concatenate([(share + tolerance)[more], (capped - tolerance)[less]])
    most = np.concatenate([np.ones(len(more)), np.maximum(cap, capped)[less]])
    room = np.where(sign > 0, limit, most - limit)
    bins = np.concatenate([more, less])
    return Bettors(bin=bins, sign=sign, limit=limit, cap=most, stakes=STAKES / room[:, None])


def start(size: int) -> Evidence:
    return Evidence(
        log_m=np.full((size, len(STAKES)), -np.inf, np.float32),
        run=np.zeros(size, np.float32),
        since=np.zeros(size),
        hits=np.zeros(size),
        rows=np.zeros(size),
    )


def log_factors(who: Bettors, chosen: Array, share: Array) -> Array:
    """What a block multiplies the wealth of the chosen bettors by (logarithm), [chosen, stakes]."""
    won = who.sign[chosen] * (np.minimum(share, who.cap[chosen]) - who.limit[chosen])
    found: Array = np.log1p(won[:, None] * who.stakes[chosen])
    return found


def advance(evidence: Evidence, who: Bettors, chosen: Array, hits: Array, rows: Array, began: Array) -> None:
    """Adds a block of each chosen bettor: `hits` of `rows` were in its bin; the block began at `began`."""
    factors = log_factors(who, chosen, hits / rows)
    evidence.log_m[chosen] = np.logaddexp(evidence.log_m[chosen].astype(np.float64), 0.0) + factors
    restart = evidence.run[chosen] <= 0
    evidence.run[chosen] = np.where(restart, 0.0, evidence.run[chosen]) + factors[:, _TRACKED]
    evidence.since[chosen] = np.where(restart, began, evidence.since[chosen])
    evidence.hits[chosen] = np.where(restart, 0.0, evidence.hits[chosen]) + hits
    evidence.rows[chosen] = np.where(restart, 0.0, evidence.rows[chosen]) + rows


def forget(evidence: Evidence, chosen: Array) -> None:
    """Starts the chosen bettors again."""
    evidence.log_m[chosen] = -np.inf
    for values in (evidence.run, evidence.since, evidence.hits, evidence.rows):
        values[chosen] = 0


def means(evidence: Evidence, chosen: Array | slice = slice(None)) -> Array:
    """M of each bettor: the mean over its stakes."""
    found: Array = np.exp(np.minimum(evidence.log_m[chosen].astype(np.float64), 600.0)).mean(axis=-1)
    return found
