"""The learning rate at every step: a linear warm-up, then half a cosine, a constant, or halved at plateaus. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

_WARM_UP_SHARE = 0.05
_LONGEST_WARM_UP = 1000
_PLATEAU_EPOCHS = 2  # without a better metric before the rate is halved


def learning_rate_at(
    step: int,
    *,
    steps: int,
    peak: float,
    schedule: Literal["cosine", "constant", "plateau"] = "cosine",
    goodness: Sequence[float] = (),
) -> float:
    """Returns the rate of the step with index `step` (from 0) of `steps`.

    `goodness` is that of the epochs before, higher is better. The rate depends on nothing else, so a resumed run
    continues alike.
    """
    warm_up = min(_LONGEST_WARM_UP, int(steps * _WARM_UP_SHARE))
    if step < warm_up:
        return peak * (step + 1) / (warm_up + 1)
    match schedule:
        case "cosine":
            done = (step - warm_up) / max(1, steps - warm_up)
            return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        case "constant":
            return peak
        case "plateau":
            return float(peak * 0.5 ** _plateaus(goodness))


def epochs_since_best(goodness: Sequence[float]) -> int:
    """Returns how many epochs ago the best one ended."""
    best = max(range(len(goodness)), key=lambda epoch: goodness[epoch], default=-1)
    return len(goodness) - 1 - best


def _plateaus(goodness: Sequence[float]) -> int:
    best, waited, found = -math.inf, 0, 0
    for value in goodness:
        waited = 0 if value > best else waited + 1
        best = max(best, value)
        if waited == _PLATEAU_EPOCHS:
            found, waited = found + 1, 0
    return found
