from __future__ import annotations

from typing import Any

from serin.formats.serving.request import Request
from serin.monitoring.latency import ReleaseLatency, summarise


def request(t: float = 100.0, ms: float | None = 5.0, **changes: Any) -> Request:
    us = None if ms is None else ms * 1000
    return Request(
        t, "flights", 3, "stable", "flights-v1", 200, None, us, us, 1, "-", "HTTP/1.1", "a"
    )._replace(**changes)


def latency(**changes: Any) -> ReleaseLatency:
    fields: dict[str, Any] = {
        "model": "flights",
        "release": "flights-v1",
        "arm": "stable",
        "requests": 1000,
        "requests_per_s": 10.0,
        "p50_ms": 5.0,
        "p95_ms": 9.0,
        "p99_ms": 20.0,
        "error_share": 0.001,
    }
    return ReleaseLatency(**(fields | changes))


def test_quantiles_are_those_of_the_requests() -> None:
    (found,) = summarise([request(ms=float(ms)) for ms in range(1, 101)], 10.0)
    assert (found.p50_ms, found.p95_ms, found.p99_ms) == (51.0, 96.0, 100.0)


def test_each_release_and_arm_is_summed_up_by_itself() -> None:
    requests = [
        *(request(t) for t in (91.0, 95.0, 100.0)),
        request(arm="candidate", release="flights-v2", code=503),
        request(arm="candidate", release="flights-v2"),
        request(arm="pinned", release="flights-v2"),
        request(model="taxis", release="taxis-v1"),
    ]
    found = {
        (each.release, each.arm): (each.requests, each.error_share) for each in summarise(requests, 10.0)
    }
    assert found == {
        ("flights-v1", "stable"): (3, 0.0),
        ("flights-v2", "candidate"): (2, 0.5),
        ("flights-v2", "pinned"): (1, 0.0),
        ("taxis-v1", "stable"): (1, 0.0),
    }


def test_only_the_window_counts() -> None:
    requests = [request(float(t)) for t in range(100)]
    (newest,) = summarise(requests, 10.0)
    (older,) = summarise(requests, 10.0, until=49.0)
    assert (newest.requests, newest.requests_per_s, older.requests) == (10, 1.0, 10)
    assert summarise(requests, 10.0, until=500.0) == ()
    assert summarise([], 10.0) == ()


def test_a_request_that_was_given_up_counts_but_has_no_latency() -> None:
    (found,) = summarise([request(ms=None, code=0, flags="DC")], 10.0)
    assert (found.requests, found.p99_ms, found.error_share) == (1, None, 0.0)
