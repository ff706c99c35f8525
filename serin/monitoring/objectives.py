"""Finds releases that break the promises of their spec. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from serin.monitoring.latency import ReleaseLatency

_MIN_REQUESTS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    model: str
    release: str
    arm: str
    what: Literal["p99_ms", "error_share"]
    value: float
    limit: float

    def __str__(self) -> str:
        if self.what == "p99_ms":
            return f"{self.release} ({self.arm}): p99 {self.value:.1f} ms, promised {self.limit:g} ms"
        return f"{self.release} ({self.arm}): {self.value:.2%} of requests failed, limit {self.limit:.2%}"


def breaches(
    latencies: Iterable[ReleaseLatency],
    *,
    p99_ms: float,
    max_error_share: float,
    min_requests: int = _MIN_REQUESTS,
) -> tuple[Breach, ...]:
    """Returns every broken promise, in the order of `latencies`. Fewer than `min_requests` requests break none."""
    found = []
    for seen in latencies:
        if seen.requests < min_requests:
            continue
        measured: tuple[tuple[Literal["p99_ms", "error_share"], float | None, float], ...] = (
            ("p99_ms", seen.p99_ms, p99_ms),
            ("error_share", seen.error_share, max_error_share),
        )
        found += [
            Breach(model=seen.model, release=seen.release, arm=seen.arm, what=what, value=value, limit=limit)
            for what, value, limit in measured
            if value is not None and value > limit
        ]
    return tuple(found)
