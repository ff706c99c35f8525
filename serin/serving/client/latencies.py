"""Latencies as counts in bins 1% wide: small for any number of requests, exact to add, cheap to fill.

The judge of rollouts has coarser bins (evidence/histogram.py), which it stores in its journal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np

_WIDTH: Final = 0.01  # of a bin, in the logarithm
_SHORTEST_S: Final = 1e-6
_BINS: Final = 2_000  # the last one begins at about 480 s


class Latencies:
    """Counted latencies. A quantile is at most 1% above a latency that was counted, and never below it."""

    __slots__ = ("_counts", "count", "longest_s")

    def __init__(self, seconds: Iterable[float] = ()) -> None:
        self._counts = [0] * _BINS
        self.count = 0
        self.longest_s = 0.0
        for each in seconds:
            self.add(each)

    def add(self, seconds: float) -> None:
        place = int(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) / _WIDTH)
        self._counts[min(place, _BINS - 1)] += 1
        self.count += 1
        self.longest_s = max(self.longest_s, seconds)

    def merge(self, other: Latencies) -> None:
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.longest_s = max(self.longest_s, other.longest_s)

    def quantile_ms(self, share: float) -> float:
        """Returns the latency within which this share of the requests was answered; NaN when nothing was counted."""
        if not self.count:
            return math.nan
        up_to = np.cumsum(self._counts)
        place = int(np.searchsorted(up_to, max(share * self.count * (1 - 1e-12), 1)))
        upper_s = _SHORTEST_S * math.exp((place + 1) * _WIDTH)
        return min(upper_s, self.longest_s) * 1000
