"""python -m benchmarks.suite: the quick runs of all benchmarks one after the other, their goals met and missed.

The figures are kept in benchmarks/results/, one file per kind of machine, and written again after each benchmark; a
chart of them is drawn beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.__main__ import BENCHMARKS
from benchmarks.machine import kind_of_machine
from benchmarks.suite.curves_picture import draw_curves
from benchmarks.suite.goals import GOALS
from benchmarks.suite.parts import ROOT, Part
from benchmarks.suite.picture import draw
from benchmarks.suite.runner import Kept, run_parts
from benchmarks.suite.table import show_goals, show_table

EACH_S = 300.0  # a quick run takes three minutes on a quiet machine
NAMES = list(dict.fromkeys([*GOALS, *BENCHMARKS]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=NAMES, help="run these only")
    parser.add_argument(
        "--each", type=float, default=EACH_S, metavar="S", help="end a benchmark after S seconds"
    )
    parser.add_argument(
        "--again", type=int, default=0, metavar="N",
        help="run a benchmark up to N times more while the host of a virtual machine takes much CPU time from it",
    )  # fmt: skip
    parser.add_argument("--commit", default="", help="the commit under test, where there is no git")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder for figures and chart"
    )
    parser.add_argument("--logs", type=Path, help="keep the output of each benchmark in this folder")
    chosen = parser.parse_args()
    parts = parts_of(chosen.only or NAMES)
    path = chosen.results / f"{kind_of_machine()}.json"
    facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": chosen.commit or None}
    head = {"format": "serin.benchmarks", "version": 1, **facts}
    kept = Kept(
        parts, path=path, head=head, earlier=read_earlier(path, without={part.name for part in parts})
    )
    with tempfile.TemporaryDirectory(prefix="serin-bench-") as scratch:
        logs = chosen.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        for part in parts:  # one at a time, each with its own deadline
            for _ in range(1 + chosen.again):
                run_parts([part], kept, logs, at_once=1, deadline=time.monotonic() + chosen.each)
                outcome = kept.outcome_of(part)
                if outcome is None or outcome.has_failed or not outcome.is_disturbed:
                    break
    named = {part.name: part for part in parts}
    print(f"\n{show_table(kept.outcomes, named)}")
    print(show_goals(kept.outcomes, named))
    picture = path.with_suffix(".svg")
    document = json.loads(path.read_text(encoding="utf-8"))
    draw(document, picture)
    curves = draw_curves(document, path)
    print(f"kept in {path}; drawn: {', '.join(each.name for each in (picture, *curves))}")
    good = ("passed", "goal missed")  # a figure below its goal is shown, and no failure
    return 0 if all(outcome.result in good for outcome in kept.outcomes) else 1


def parts_of(names: list[str]) -> list[Part]:
    return [
        Part(
            name=name,
            command=("-m", "benchmarks", name),
            alone=True,
            goals=GOALS.get(name, {}),
            complete=False,
            report=True,
        )
        for name in names
    ]


def read_earlier(path: Path, *, without: set[str]) -> list[dict[str, object]]:
    """Returns the benchmarks of an earlier run on the same kind of machine that are not run now."""
    if not path.exists():
        return []
    parts: list[dict[str, object]] = json.loads(path.read_text(encoding="utf-8"))["parts"]
    return [part for part in parts if part["name"] not in without]


if __name__ == "__main__":
    sys.exit(main())
