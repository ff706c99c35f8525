"""The watch benchmark: the cost of recording requests, and how soon drift is found."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.machine import machine
from benchmarks.race import MIN_REPETITIONS
from benchmarks.report import Report
from benchmarks.watch import capture, drift_race, records, shift_table


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    rounds, lap_s = (25, 3.0) if full else (MIN_REPETITIONS, 0.7)
    recorded = records.measure_records(full=full, say=say)
    drift = drift_race.measure_drift(full=full, say=say)
    shifts = shift_table.measure_shifts(runs=11 if full else 3, say=say)
    costs = capture.measure_capture(rounds=rounds, lap_s=lap_s, rush_s=60.0 if full else 6.0, say=say)
    return Report(
        benchmark="watch",
        mode="full" if full else "quick",
        environment=machine(),
        cases={},
        tables=[
            *capture.table(costs),
            *records.table(recorded),
            *shift_table.table(shifts),
            *drift_race.table(drift),
        ],
        figures={
            "capture": capture.figures(costs),
            "records": records.figures(recorded),
            "drift": drift_race.figures(drift),
        },
        line={
            **capture.last_line(costs),
            **records.last_line(recorded),
            **shift_table.last_line(shifts),
            **drift_race.last_line(drift),
        },
        notes=[
            "releases with and without recording take turns; the recorder runs all the time",
            *drift.notes,
        ],
    )
