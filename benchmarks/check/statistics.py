"""Decides whether a ratio has really fallen, by bootstrap intervals over the rounds. Pure.

The earlier ratios come from several runs, so that it is known how much a ratio changes from run to run while nothing
has changed: caches, memory layout and neighbours move all rounds of a run together, and rounds alone would hide it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

TOLERATED = 0.05  # of a ratio: a smaller loss is not reported
ALPHA = 0.05  # one-sided, for each of the two measurements that a reported loss needs
DRAWS = 4000
LEAST_RUNS = 3

Verdict = Literal["lost", "gained", "equal"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The new ratio over the earlier one: 0.8 has lost a fifth. `low` and `high`: bounds of one-sided intervals."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        if self.high < 1 - TOLERATED:
            return "lost"
        return "gained" if self.low > 1 / (1 - TOLERATED) else "equal"

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


def compare(
    earlier: Sequence[Sequence[float]], now: Sequence[float], *, seed: int = 0, draws: int = DRAWS
) -> Change:
    """Compares the ratios of one run's rounds with those of several earlier runs."""
    if len(earlier) < LEAST_RUNS:
        raise ValueError(f"{len(earlier)} earlier runs are too few to compare with; {LEAST_RUNS} are needed")
    random = np.random.default_rng(seed)
    before = [np.log(np.asarray(run, np.float64)) for run in earlier]
    middles = np.stack([_middles(run, draws, random) for run in before])  # [runs, draws]
    centres = np.array([_middle(run) for run in before])
    chosen = random.integers(0, len(before), (len(before), draws))
    old = np.take_along_axis(middles, chosen, axis=0).mean(axis=0)
    latest = np.log(np.asarray(now, np.float64))
    new = _middles(latest, draws, random)
    # A run's common effect, with the tails that so few earlier runs leave possible.
    effect = _between_runs(centres, middles) * random.standard_t(len(before) - 1, draws)
    low, high = np.quantile(new + effect - old, (ALPHA, 1 - ALPHA))
    change = float(_middle(latest) - centres.mean())
    return Change(ratio=math.exp(change), low=math.exp(low), high=math.exp(high))


def _middle(rounds: Floats) -> Floats:
    """Returns the mean of the middle half along the last axis: outliers do not count, and it varies less than the
    median."""
    cut, ordered = rounds.shape[-1] // 4, np.sort(rounds, axis=-1)
    found: Floats = ordered[..., cut : rounds.shape[-1] - cut].mean(axis=-1)
    return found


def _middles(rounds: Floats, draws: int, random: np.random.Generator) -> Floats:
    """Returns the middles of rounds that are drawn with replacement."""
    return _middle(random.choice(rounds, (draws, len(rounds))))


def _between_runs(centres: Floats, middles: Floats) -> float:
    """Returns the standard deviation of runs beyond what their own rounds explain."""
    return math.sqrt(max(0.0, float(centres.var(ddof=1) - middles.var(axis=1).mean())))
