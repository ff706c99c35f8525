"""Curves of the ETL: CPU seconds against rows, columns and distinct values.

python -m benchmarks.scale.etl_curves --full --only rows
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.child import Child, ContenderFailed
from benchmarks.machine import core_count
from benchmarks.scale.curves import Curve, table

FIXED = {"rows": 50_000, "columns": 10, "cardinality": 1000}  # the size of the other axes
QUICK = {
    "rows": (100_000, 300_000, 1_000_000, 3_000_000),
    "columns": (10, 50, 250, 1000),
    "cardinality": (100, 3_000, 100_000, 1_000_000),
}
FULL = {
    "rows": (100_000, 1_000_000, 10_000_000, 100_000_000),
    "columns": (10, 50, 250, 1000, 2000),
    "cardinality": (100, 10_000, 1_000_000, 10_000_000),
}
# Rows of the tables with many columns or distinct values.
QUICK_ROWS = {"columns": 10_000, "cardinality": 1_000_000}
FULL_ROWS = {"columns": 50_000, "cardinality": 20_000_000}
WHAT = {
    "rows": "the ETL by rows, 10 numeric columns and one of strings",
    "columns": "the ETL by numeric columns, {columns:,} rows",
    "cardinality": "the ETL by distinct values of a column, {cardinality:,} rows",
}
EXPECTED = {"rows": 1.0, "columns": 1.0, "cardinality": 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.etl_curves")
    parser.add_argument("--full", action="store_true", help="up to 100 million rows: 25 GB of disk")
    parser.add_argument("--only", choices=sorted(WHAT), help="measure only this curve")
    chosen = parser.parse_args()
    print("\n".join(table(measure_etl(full=chosen.full, say=print, only=chosen.only))))
    return 0


def measure_etl(*, full: bool, say: Callable[[str], None], only: str | None = None) -> list[Curve]:
    """The faster of two runs at sizes that take a moment, after a small one that reads the libraries."""
    rows, curves = FULL_ROWS if full else QUICK_ROWS, []
    with (
        tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch,
        Child("benchmarks.scale.etl_load", python=sys.executable, threads=core_count()) as child,
    ):
        child.run({**FIXED, "folder": f"{scratch}/first"})
        for axis, sizes in (FULL if full else QUICK).items():
            if only not in (None, axis):
                continue
            fixed = {**FIXED, **({"rows": rows[axis]} if axis in rows else {})}
            points = {
                size: _cheapest(child, {**fixed, axis: size, "folder": str(Path(scratch) / f"{axis}-{size}")})
                for size in sizes
            }
            curves.append(
                Curve(
                    name=axis,
                    what=WHAT[axis].format(**rows),
                    unit="CPU seconds",
                    expected=EXPECTED[axis],
                    points=points,
                )
            )
            say(f"curve of {axis}")
    return curves


def _cheapest(child: Child, request: dict[str, object]) -> float:
    found: list[float] = []
    while len(found) < (2 if not found or found[0] < 2.0 else 1):
        lap = child.run(request)
        if lap.answer["rows"] != request["rows"]:
            raise ContenderFailed(f"{lap.answer['rows']:,} rows of {request['rows']:,} were written")
        found.append(lap.seconds)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
