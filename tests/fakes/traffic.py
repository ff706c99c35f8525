"""Requests as a gateway would have logged them, made up by chance from a seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serin.formats.serving.request import Request

STABLE, CANDIDATE = "flights-v1", "flights-v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Arrivals by chance, lognormal latencies of 2 ms, lines in the order in which requests end."""

    requests_per_s: float = 100.0
    share: float = 0.5  # the candidate's
    slower: float = 1.0  # the candidate's latencies, times this
    errors: tuple[float, float] = (0.0, 0.0)  # share that fails: stable, candidate
    epoch: int = 3
    median_ms: float = 2.0
    spread: float = 0.5

    def requests(self, start: float, seconds: float, seed: int = 0) -> list[Request]:
        random = np.random.default_rng(seed)
        count = random.poisson(self.requests_per_s * seconds)
        t = np.sort(start + seconds * random.random(count))
        candidate = random.random(count) < self.share
        us = self.median_ms * 1000 * np.exp(self.spread * random.standard_normal(count))
        us = np.where(candidate, us * self.slower, us)
        failed = random.random(count) < np.where(candidate, self.errors[1], self.errors[0])
        ended = np.argsort(t + us / 1e6, kind="stable")
        return [
            Request(
                round(float(t[i]), 6),
                "flights",
                self.epoch,
                "candidate" if candidate[i] else "stable",
                CANDIDATE if candidate[i] else STABLE,
                503 if failed[i] else 200,
                None,
                math.ceil(us[i]),
                1,
                "-",
                f"{seed}-{i}",
            )
            for i in ended
        ]


def changed(
    requests: list[Request], where: Callable[[Request], bool], change: Callable[[Request], Request]
) -> list[Request]:
    return [change(request) if where(request) else request for request in requests]
