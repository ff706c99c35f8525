"""A day of traffic: quiet nights, a busy afternoon, and one burst of five times as much."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

DAY_S: Final = 86_400
TICK_S: Final = 1.0
TICKS: Final = int(DAY_S / TICK_S)
BURST: Final = 5.0


def requests(seed: int, usual_per_s: float, *, rise_s: float, lasts_s: float = 2400.0) -> Array:
    """Returns the requests of each tick. `usual_per_s`: at the busiest time of the day, without the burst, which begins
    somewhere between 9 and 20 o'clock, is there after `rise_s`, and fades within ten minutes."""
    draw = np.random.default_rng(seed)
    t = np.arange(TICKS) * TICK_S
    daily = 0.6 - 0.4 * np.cos((t / DAY_S - 2 / 24) * 2 * np.pi)  # the least at 2 o'clock: a fifth
    begins = draw.uniform(9, 20) * 3600
    corners = [begins, begins + rise_s, begins + rise_s + lasts_s, begins + rise_s + lasts_s + 600]
    burst = np.interp(t, corners, [1.0, BURST, BURST, 1.0])
    rate = usual_per_s * daily * burst * np.exp(_wandering(draw, t) + draw.normal(0.0, 0.05, TICKS))
    return draw.poisson(rate * TICK_S).astype(float)


def _wandering(draw: np.random.Generator, t: Array) -> Array:
    """Ten percent up and down, within minutes."""
    every_s = 60
    steps = draw.normal(0.0, 1.0, DAY_S // every_s + 1)
    keeps = 0.9
    found = np.empty_like(steps)
    level = 0.0
    for index, step in enumerate(steps):
        level = keeps * level + np.sqrt(1 - keeps**2) * step
        found[index] = level
    return np.asarray(0.1 * np.interp(t, np.arange(len(found)) * every_s, found))
