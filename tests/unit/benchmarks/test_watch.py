from __future__ import annotations

from benchmarks.watch.capture import Costs, Lap, Pair, last_line, table


def _laps(*speeds: float, p99_ms: float, cpu_us: float) -> list[Lap]:
    return [
        Lap(requests_per_s=speed, p50_ms=1.0, p99_ms=p99_ms * 1000 / speed, cpu_us=cpu_us) for speed in speeds
    ]


def test_costs_are_compared_within_a_round() -> None:
    without = _laps(1000, 500, 2000, p99_ms=2.0, cpu_us=100)
    recorded = _laps(980, 490, 1960, p99_ms=2.0, cpu_us=103)
    costs = Costs({"onnx_native": Pair(without, recorded)}, recorder_us=30.0, requests=7, dropped=1)
    line = last_line(costs)
    assert round(line["onnx_native_throughput"], 9) == 0.98
    assert round(line["capture_cost"], 9) == 0.02
    assert round(line["onnx_native_cpu"], 9) == 1.03
    assert round(line["onnx_native_p99_added_ms"], 3) == 0.041
    assert (line["recorder_us"], line["dropped"]) == (30.0, 1.0)
    assert "7 requests recorded, 1 dropped" in "\n".join(table(costs))
