"""Latency of each release, computed from the gateway's request log."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from serin.formats.serving.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLatency:
    """The latency of one release in one arm over a window. A quantile is None when no request was answered."""

    model: str
    release: str
    arm: str
    requests: int
    requests_per_s: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    error_share: float


def summarise(
    requests: Iterable[Request], window_s: float, *, until: float | None = None
) -> tuple[ReleaseLatency, ...]:
    """Returns one entry for each release and arm with requests in the `window_s` before `until` (None: the newest
    arrival).

    Quantiles are over answered requests. Each is a latency that some request had, so p99 is never better than what the
    slowest hundredth saw. A request that the client cancelled has no duration; it counts as a request.
    """
    seen = list(requests)
    if not seen:
        return ()
    end = max(request.t for request in seen) if until is None else until
    groups: dict[tuple[str, str, str], list[Request]] = defaultdict(list)
    for request in seen:
        if end - window_s < request.t <= end:
            groups[request.model, request.release, request.arm].append(request)
    return tuple(_latency(key, group, window_s) for key, group in sorted(groups.items()))


def _latency(key: tuple[str, str, str], group: list[Request], window_s: float) -> ReleaseLatency:
    model, release, arm = key
    answered_ms = sorted(request.us / 1000 for request in group if request.us is not None)
    p50, p95, p99 = (
        (answered_ms[math.ceil(q * (len(answered_ms) - 1))] for q in (0.5, 0.95, 0.99))
        if answered_ms
        else (None, None, None)
    )
    return ReleaseLatency(
        model=model,
        release=release,
        arm=arm,
        requests=len(group),
        requests_per_s=len(group) / window_s,
        p50_ms=p50,
        p95_ms=p95,
        p99_ms=p99,
        error_share=sum(request.failed for request in group) / len(group),
    )
