"""Scaling curves of the ETL: CPU seconds against rows, columns and distinct values, and their exponents."""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.child import Child, ContenderFailed
from serin.machine.hardware import core_count

Curve = Mapping[int, float]  # CPU seconds by size
AXES = ("rows", "columns", "cardinality")
FIXED = {"rows": 50_000, "columns": 10, "cardinality": 1000}  # the size of the other axes
QUICK = {
    "rows": (50_000, 200_000, 800_000),
    "columns": (10, 50, 250),
    "cardinality": (100, 3_000, 40_000),
}
FULL = {
    "rows": (100_000, 1_000_000, 10_000_000, 100_000_000),
    "columns": (10, 50, 250, 1000, 2000),
    "cardinality": (100, 10_000, 1_000_000, 10_000_000),
}
FULL_ROWS = 20_000_000  # of the table with many distinct values: two rows for each


def measure_curves(*, full: bool, say: Callable[[str], None]) -> dict[str, dict[int, float]]:
    """The faster of two runs at each size (one with `full`), after a small one that reads the libraries."""
    found: dict[str, dict[int, float]] = {axis: {} for axis in AXES}
    with tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch:
        child = Child("benchmarks.scale.etl_load", python=sys.executable, threads=core_count())
        with child:
            child.run({**FIXED, "folder": f"{scratch}/first"})
            for axis, sizes in (FULL if full else QUICK).items():
                for size in sizes:
                    request = {**FIXED, axis: size, "folder": str(Path(scratch) / f"{axis}-{size}")}
                    if axis == "cardinality" and full:
                        request["rows"] = FULL_ROWS
                    laps = [child.run(request) for _ in range(1 if full else 2)]
                    if any(lap.answer["rows"] != request["rows"] for lap in laps):
                        raise ContenderFailed(
                            f"{laps[0].answer['rows']:,} rows of {request['rows']:,} were written"
                        )
                    found[axis][size] = min(lap.seconds for lap in laps)
                say(f"curve of {axis}")
    return found


def exponent(curve: Curve) -> float:
    """Returns the slope between the two largest sizes on logarithmic axes: 1 is linear, 0 does not grow."""
    (few, less), (many, more) = sorted(curve.items())[-2:]
    return math.log(more / less) / math.log(many / few)


def table(curves: Mapping[str, Curve]) -> list[str]:
    lines = ["scale, the ETL (CPU seconds)"]
    for axis, curve in curves.items():
        cells = "".join(f"{size:>12,}: {seconds:.2f} s" for size, seconds in curve.items())
        lines.append(f"  {axis:<12}{cells}   exponent {exponent(curve):.2f}")
    return [*lines, ""]
