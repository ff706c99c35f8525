"""E-detectors: evidence that the shares of bins have left their tolerance at some unknown time. Pure.

The claim: in every block, given the past, the mean share of a bin is within its tolerance of the training share. A
bettor multiplies by a factor whose mean is at most 1 while the claim holds. The Shiryaev-Roberts statistic
M = (w + M) x factor sums the wealth of bettors started at each block, so it finds a change after any length of time
without one. What they start with, w, is the time that the block before took. So after a time t the mean of M is at most
t: if an alarm needs M >= c, the mean time until a false alarm is at least c, however short the blocks are. Means of
such statistics keep the promise however they depend on each other.

A stake is bounded by what a block can lose. A bet on "more" counts a share below `floor` as `floor`, one on "less" a
share above `cap` as `cap`, and each expects the training mean of what it counts. The possible loss is then little more
than the tolerance, and a large shift multiplies the wealth several times as fast as it would with plain shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from serin.evidence.e_process import Array

STAKES: Final = np.array((0.3, 0.6, 0.97))  # of the largest stake that cannot be ruined
_MEAN_EXCESS: Final = 0.4  # of a normal variable above its mean, in standard deviations
_PAUSE_S: Final = 86_400.0
_TRACKED: Final = 0  # the stake whose latest restart says since when


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """What training says about the shares of bins, one entry per bin. `floored`: the mean of a block's share when it
    counts as at least `floor`; `capped`: when it counts as at most `cap`. `rows`: how many a training block had."""

    share: Array
    floor: Array
    floored: Array
    cap: Array
    capped: Array
    rows: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bettors:
    """One bettor per bin and direction that can win; the stakes run side by side. `sign`: 1 for "more", -1 for "less".
    `limit`: the share from which it wins. `least`, `most`: a share counts as at least and at most this. `room`: the
    most that a block can lose. `noise`: the variance of a single row's part in what a block counts, 0 where only its
    mean matters; `rows`: of a training block."""

    bin: Array
    sign: Array
    limit: Array
    least: Array
    most: Array
    room: Array
    noise: Array
    rows: Array

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


def bettors(expected: Expected, tolerance: Array) -> Bettors:
    """The bettors for these bins. A floor or a cap that is close to the mean allows a larger stake."""
    more = np.flatnonzero(expected.floored + tolerance < 1)
    less = np.flatnonzero(expected.capped - tolerance > 0)
    bins = np.concatenate([more, less])
    sign = np.repeat([1.0, -1.0], [len(more), len(less)])
    limit = np.concatenate([(expected.floored + tolerance)[more], (expected.capped - tolerance)[less]])
    least = np.concatenate([expected.floor[more], np.zeros(len(less))])
    most = np.concatenate([np.ones(len(more)), np.maximum(expected.cap, expected.capped)[less]])
    plain = np.where(sign > 0, least <= 0, most >= 1)
    share = expected.share[bins]
    return Bettors(
        bin=bins,
        sign=sign,
        limit=limit,
        least=least,
        most=most,
        room=np.where(sign > 0, limit - least, most - limit),
        noise=np.where(plain, 0.0, share * (1 - share)),
        rows=expected.rows[bins],
    )


def weights(who: Bettors, series: Array, apart: Array) -> Array:
    """The part of each bettor in the evidence of its series: half for bets on "more" in bins that are `apart`, half
    for the others, each evenly. `series`: of each bettor; `apart`: of each bin."""
    chosen = apart[who.bin] & (who.sign > 0)
    found = np.zeros(len(who))
    size = int(series.max(initial=-1)) + 1
    both = np.bincount(series[chosen], minlength=size) * np.bincount(series[~chosen], minlength=size) > 0
    for own in (chosen, ~chosen):
        counts = np.bincount(series[own], minlength=size)
        found[own] = (np.where(both, 0.5, 1.0) / np.maximum(counts, 1))[series[own]]
    return found


def waited(seconds: Array | float, block_s: Array | float) -> Array:
    """What bettors start with after a block that took so long, in blocks. A pause of days counts as one day."""
    return np.asarray(np.clip(np.asarray(seconds) / block_s, 1.0, np.maximum(_PAUSE_S / block_s, 1.0)))


def start(size: int) -> Evidence:
    return Evidence(
        log_m=np.full((size, len(STAKES)), -np.inf, np.float32),
        run=np.zeros(size, np.float32),
        since=np.zeros(size),
        hits=np.zeros(size),
        rows=np.zeros(size),
    )


def log_factors(who: Bettors, chosen: Array, share: Array, rows: Array | None = None) -> Array:
    """What blocks multiply the wealth of the chosen bettors by (logarithm), [..., chosen, stakes]. `rows`: of a block;
    with fewer than a training block had, chance moves what it counts by more, which the bet allows for."""
    sign, limit, room = who.sign[chosen], who.limit[chosen], who.room[chosen]
    counted = np.clip(share, who.least[chosen], who.most[chosen])
    won = sign * (counted - limit)
    if rows is not None:
        fewer = np.maximum(1.0 / rows - 1.0 / who.rows[chosen], 0.0)
        more = _MEAN_EXCESS * np.sqrt(who.noise[chosen] * fewer)
        won, room = won - more, room + more
    found: Array = np.log1p((won / room)[..., None] * STAKES)
    return found


def advance(
    evidence: Evidence, who: Bettors, chosen: Array, *, hits: Array, rows: Array, began: Array, waited: Array
) -> None:
    """Adds a block of each chosen bettor: `hits` of `rows` were in its bin; the block began at `began`. `waited`: the
    time that the block before took, in the unit of M."""
    factors = log_factors(who, chosen, hits / rows, rows)
    before = evidence.log_m[chosen].astype(np.float64)
    evidence.log_m[chosen] = np.logaddexp(before, np.log(waited)[:, None]) + factors
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
