"""The learning rate at every step: a linear warm-up, then half a cosine down to nothing. Pure."""

from __future__ import annotations

import math

_WARM_UP_SHARE = 0.05
_LONGEST_WARM_UP = 1000


def learning_rate_at(step: int, *, steps: int, peak: float) -> float:
    """For the step with index `step` (from 0) of `steps`. Depends on nothing else, so a resumed run goes on alike."""
    warm_up = min(_LONGEST_WARM_UP, int(steps * _WARM_UP_SHARE))
    if step < warm_up:
        return peak * (step + 1) / (warm_up + 1)
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
