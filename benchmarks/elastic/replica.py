"""How fast one replica answers, by how many requests it has at the same time. Recorded, not invented.

`RECORDED` is the column "CPU, HTTP" of the table in benchmarks/results/history.md ("GPU serving, by rows and clients"):
an mlp of 2048, 1024 and 512 through the gateway, in a closed loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from serin.serving.tuning.tune import STEADY

Array = np.ndarray[Any, Any]

_GRID: Final = 512
_Z99: Final = 2.3263  # of a normal distribution


@dataclass(frozen=True)
class Replica:
    """`points`: clients, requests/s, p50 and p99 in ms. `limit_ms`: the promised latency, of 99% of requests."""

    points: tuple[tuple[float, float, float, float], ...]
    limit_ms: float
    timeout_s: float = 5.0  # serving.request_timeout: a request that waits longer fails

    @property
    def in_flight(self) -> float:
        """The capacity that `serin tune` stores: the clients with the most requests/s within the promise."""
        return max((rate, clients) for clients, rate, _, p99 in self.points if p99 <= self.limit_ms)[1]

    @property
    def requests_per_s(self) -> float:
        """... and the requests/s: of the rates that it tries in an open loop the highest, which keeps the promise."""
        return STEADY[0] * max(rate for _, rate, _, p99 in self.points if p99 <= self.limit_ms)

    @property
    def most_per_s(self) -> float:
        return max(rate for _, rate, _, _ in self.points)

    @cached_property
    def _curve(self) -> Array:
        """Rows: requests/s, requests in flight, p50, p99; between the measured points on straight lines of logarithms,
        and below one request at a time in proportion."""
        rate, clients, p50, p99 = np.log(np.array(sorted((b, a, c, d) for a, b, c, d in self.points))).T
        rates = np.linspace(0.0, self.most_per_s, _GRID)
        known = np.log(rates.clip(math.exp(rate[0])))
        made = [np.exp(np.interp(known, rate, values)) for values in (clients, p50, p99)]
        made[0] = np.where(rates < math.exp(rate[0]), rates / math.exp(rate[0]), made[0])
        return np.array([rates, *made])

    def in_flight_at(self, rate: Array) -> Array:
        """The requests in flight of a replica that gets so many per second, none of which waits for an earlier one."""
        return np.interp(rate, self._curve[0], self._curve[1])

    def queue_ms_at(self, rate: Array) -> Array:
        """How much longer than alone a request takes."""
        return np.interp(rate, self._curve[0], self._curve[2]) - self._curve[2][0]

    @cached_property
    def _slow(self) -> Array:
        """The share of requests above the promise, by rate (rows) and time waited before (columns)."""
        _, _, p50, p99 = self._curve
        left = np.maximum(self.limit_ms * (1 - np.linspace(0.0, 1.0, _GRID)), 1e-9)
        spread = np.maximum(np.log(p99 / p50) / _Z99, 1e-9)[:, None]
        z = (np.log(left)[None, :] - np.log(p50)[:, None]) / spread
        above = np.vectorize(lambda value: 0.5 * math.erfc(value / math.sqrt(2)))
        return np.asarray(above(z))

    def slow_share(self, rate: Array, waited_ms: Array) -> Array:
        row = (rate / self.most_per_s * (_GRID - 1)).astype(int).clip(0, _GRID - 1)
        column = (waited_ms / self.limit_ms * (_GRID - 1)).astype(int).clip(0, _GRID - 1)
        return np.asarray(self._slow[row, column])


RECORDED: Final = {
    "64 rows": Replica(
        ((1, 427, 2.28, 3.33), (8, 920, 8.87, 10.30), (32, 1381, 22.93, 29.14)), limit_ms=50.0
    ),
    "1 row": Replica(((1, 818, 1.18, 1.98), (8, 3936, 1.96, 2.86), (32, 6257, 5.01, 6.70)), limit_ms=50.0),
    "512 rows": Replica(
        ((1, 138, 7.26, 9.41), (8, 178, 43.04, 56.84), (32, 185, 162.75, 183.37)), limit_ms=100.0
    ),
}
