"""The watch benchmark: what recording requests costs those who send them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.machine import machine
from benchmarks.race import MIN_REPETITIONS
from benchmarks.report import Report
from benchmarks.watch import capture


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    rounds, lap_s = (25, 3.0) if full else (MIN_REPETITIONS, 1.0)
    costs = capture.measure_capture(rounds=rounds, lap_s=lap_s, say=say)
    return Report(
        benchmark="watch",
        mode="full" if full else "quick",
        environment=machine(),
        cases={},
        tables=capture.table(costs),
        figures={"capture": capture.figures(costs)},
        line=capture.last_line(costs),
        notes=["releases with and without recording take turns; the recorder runs all the time"],
    )
