"""E-processes: sequential bets against a claim. Pure; arrays may have leading axes, one entry per rollout.

An e-process starts with wealth 1 and bets a fraction of it in each block. While the claim holds, a bet wins as often as
it loses, so the probability of ever reaching 1/alpha is at most alpha, however often it is evaluated. Eight bet
fractions run side by side, since the best one is not known in advance; the e-value is the mean of their wealth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import numpy as np

from serin.machine.typed_json import Document, Stored

Array = np.ndarray[Any, np.dtype[Any]]

STAKES: Final = np.array((0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.98))
BETTORS: Final = len(STAKES)

_SPREAD: Final = 2.0  # a difference of this many standard deviations wins the whole stake
_LARGEST: Final = 600.0  # of a logarithm: its exponential is still finite
_HALVINGS: Final = 40
_TRACKED: Final = 4  # the stake whose latest restart says since when


def start(*shape: int) -> Array:
    """Returns the initial log wealth of all bettors."""
    return np.zeros((*shape, BETTORS))


def difference(candidate: Array, control: Array) -> Array:
    """Returns how much worse the candidate looks in a block, from -1 to 1, by the bad requests of two equal arms.

    Exchanging the arms changes only the sign, which is all that a fair bet needs. A few bad requests count by their
    share, many by how far their difference exceeds its chance variation.
    """
    bad = candidate + control
    scale = np.minimum(bad, _SPREAD * np.sqrt(bad))
    found: Array = np.clip((candidate - control) / np.where(bad > 0, scale, 1.0), -1.0, 1.0)
    return found


def bet(log_wealth: Array, outcome: Array) -> Array:
    """Returns the log wealth after a block with `outcome` in -1 .. 1. Fair when +x and -x are equally likely."""
    after: Array = log_wealth + np.log1p(STAKES * np.asarray(outcome)[..., None])
    return after


def bet_on_share(log_wealth: Array, share: Array | float, target: float) -> Array:
    """Returns the log wealth after a block in which `share` of the requests were bad. Fair when the mean share is
    `target`.

    A target of 0 is a promise that a single bad request breaks.
    """
    if target <= 0:
        return log_wealth + np.where(np.asarray(share) > 0, _LARGEST, 0.0)[..., None]
    return log_wealth + np.log1p(STAKES * (np.asarray(share)[..., None] / target - 1.0))


def e_value(log_wealth: Array) -> Array:
    """Returns the e-value: the mean wealth of the eight bettors, the evidence against the claim."""
    mean: Array = np.exp(np.minimum(log_wealth, _LARGEST)).mean(axis=-1)
    return mean


def seconds_until(log_wealth: Array, growth: Array, target: float) -> float:
    """How long until the e-value reaches `target` while each bettor's wealth grows by `growth` (logarithm per second).

    Infinite when nothing grows. For one process: the arrays have no leading axes."""
    if float(e_value(log_wealth)) >= target:
        return 0.0
    grows = growth > 0
    if not grows.any():
        return math.inf
    alone = np.log(BETTORS * target) - log_wealth[grows]  # with so much one bettor is enough
    low, high = 0.0, float((alone / growth[grows]).min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (
            (low, middle) if float(e_value(log_wealth + growth * middle)) >= target else (middle, high)
        )
    return high


def split_evidence(candidate: int, requests: int, share: float) -> float:
    """Returns the evidence that the candidate's part of `requests` is not `share`: a bet on every other share at
    once."""
    if not 0 < share < 1 or requests == 0:
        return 1.0
    others = requests - candidate
    any_share = (
        math.lgamma(candidate + 0.5)
        + math.lgamma(others + 0.5)
        - math.lgamma(requests + 1.0)
        - 2 * math.lgamma(0.5)
    )
    this_share = candidate * math.log(share) + others * math.log1p(-share)
    return math.exp(min(any_share - this_share, _LARGEST))


# The claim: in every block, given the past, the mean loss is at most the limit. A bettor multiplies by 1 + stake
# (mean / limit - 1), which is 1 on average at the limit and never negative. The Shiryaev-Roberts statistic M = (1 +
# M) x factor sums the wealth of bettors started at each block, so that it finds a change after any time without one.
# While the claim holds the mean of M after n blocks is at most n: with an alarm at c, the mean number of blocks until
# a false alarm is at least c.
_LOGS: Final = Stored(
    lambda row: np.array([-np.inf if value is None else value for value in row]),
    lambda logs: [None if value == -np.inf else float(value) for value in logs],
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeanEvidence(Document):
    """`log_m`: the logarithm of M, by stake. The others follow the tracked stake since its latest restart: `run` its
    log wealth, `since` the time of the restart, `rows` and `total` the rows after it and the sum of their losses."""

    log_m: Annotated[Array, _LOGS] = field(default_factory=lambda: np.full(len(STAKES), -np.inf))
    run: float = 0.0
    since: float | None = None
    rows: int = 0
    total: float = 0.0

    @property
    def value(self) -> float:
        """M, the mean over the stakes."""
        return float(np.exp(np.minimum(self.log_m, _LARGEST)).mean())

    @property
    def mean(self) -> float | None:
        """The mean loss since the latest restart."""
        return self.total / self.rows if self.rows else None

    def add(self, *, began: float, mean: float, rows: int, limit: float, most: float) -> MeanEvidence:
        """Returns the evidence after a block. `most`: evidence beyond it is not remembered, so that a loss that has
        come back within the limit is recognised."""
        factors = np.log1p(STAKES * (mean / limit - 1.0))
        log_m = np.minimum(np.logaddexp(0.0, self.log_m) + factors, np.log(most) + 1.0)
        run = min(self.run + float(factors[_TRACKED]), float(np.log(most)))
        if run <= 0:
            return MeanEvidence(log_m=log_m)
        since = began if self.since is None else self.since
        return MeanEvidence(
            log_m=log_m, run=run, since=since, rows=self.rows + rows, total=self.total + mean * rows
        )
