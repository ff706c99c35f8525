from __future__ import annotations

import pytest

from benchmarks.race import Role
from benchmarks.serving.benchmark import Case, Lap, Laps, last_line


def laps(role: Role, *speeds: float, p50_ms: float = 1.0) -> Laps:
    return Laps(role, [Lap(speed, p50_ms, 2 * p50_ms, 100.0) for speed in speeds])


def test_the_last_line_is_judged_against_the_best_peer_in_the_worse_case() -> None:
    found = {
        Case(1, 1): {
            "serin": laps("ours", 900, 900, 900, p50_ms=1.4),
            "Triton alone": laps("limit", 1100, 1100, 1100, p50_ms=1.0),
        },
        Case(1, 8): {
            "serin": laps("ours", 1000, 1200, 800),
            "serin, JSON": laps("ours", 900, 900, 900),
            "Triton alone": laps("limit", 2000, 2000, 2000),
            "slow": laps("peer", 10, 10, 10),
            "fast": laps("peer", 500, 600, 400),
            "FastAPI, Envoy": laps("peer", 250, 300, 200),
        },
        Case(1, 32): {
            "serin": laps("ours", 1500, 1500, 1500),
            "serin, JSON": laps("ours", 900, 900, 900),
            "Triton alone": laps("limit", 2000, 2000, 2000),
            "fast": laps("peer", 1000, 1000, 1000),
            "FastAPI, Envoy": laps("peer", 600, 600, 600),
        },
        Case(64, 8): {"serin": laps("ours", 1), "fast": laps("peer", 100)},
    }
    line = last_line(found)
    assert line["best_peer"] == pytest.approx(1.5)
    assert (line["best_peer_8"], line["best_peer_32"]) == pytest.approx((2.0, 1.5))
    assert line["best_peer_alone"] == pytest.approx(2.0)
    assert line["peer_behind_envoy"] == pytest.approx(2.5)
    assert line["best_peer_json"] == pytest.approx(0.9)
    assert line["gateway_ms"] == pytest.approx(0.4)
    assert line["bare_triton"] == pytest.approx(0.5)
