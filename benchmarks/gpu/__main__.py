"""python -m benchmarks.gpu: everything that needs a GPU, in under ten minutes, as one table. Installs nothing.

First the files of tests/gpu, several at a time; then the tests that need the GPU for themselves (`pytest.mark.alone`);
then the benchmarks, one by one. What does not fit into the time is reported as not run. The result is kept in
benchmarks/results/, one file per kind of GPU, and written again after each part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.parts import BENCHMARKS, parts_of_tests
from benchmarks.gpu.versions import read_versions, show_versions
from benchmarks.machine import name_part
from benchmarks.suite.parts import ROOT
from benchmarks.suite.runner import Kept, run_parts
from benchmarks.suite.table import show_table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="PART", help="run these parts only, by their names")
    parser.add_argument("--seconds", type=float, default=570.0, help="the time for everything (default: 570)")
    parser.add_argument(
        "--at-once", type=int, default=8, help="files of tests that run together (default: 8)"
    )
    parser.add_argument("--commit", default="", help="the commit under test, where there is no git")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the result"
    )
    parser.add_argument("--logs", type=Path, help="keep the output of each part in this folder")
    parser.add_argument(
        "--anyway", action="store_true", help="run where there is no GPU: tests are skipped then"
    )
    chosen = parser.parse_args()
    versions = read_versions()
    if not versions["gpu"] and not chosen.anyway:
        print("no GPU here: nothing was run", file=sys.stderr)
        return 2
    known = [*parts_of_tests(), *BENCHMARKS]
    unknown = set(chosen.only or ()) - {part.name for part in known}
    if unknown:
        names = ", ".join(part.name for part in known)
        print(f"no such part: {', '.join(sorted(unknown))}; there are: {names}", file=sys.stderr)
        return 2
    parts = [part for part in known if chosen.only is None or part.name in chosen.only]
    facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": chosen.commit or None}
    result = Kept(
        parts,
        path=chosen.results / f"gpu-{kind_of(versions['gpu'])}.json",
        head={"format": "serin.gpu-test", "version": 1, **facts, "versions": versions},
    )
    with tempfile.TemporaryDirectory(prefix="serin-gpu-test-") as scratch:
        logs = chosen.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        run_parts(parts, result, logs, at_once=chosen.at_once, deadline=time.monotonic() + chosen.seconds)
    print(show_table(result.outcomes, {part.name: part for part in parts}))
    print(show_versions(facts, versions))
    print(f"kept in {result.path}")
    good = ("passed", "skipped", "goal missed")  # a figure below its goal is shown, and no failure
    return 0 if all(outcome.result in good for outcome in result.outcomes) else 1


def kind_of(gpus: Sequence[str]) -> str:
    """The kind of machine as part of a file's name: nvidia-h200, or 8x-nvidia-h200."""
    if not gpus:
        return "none"
    name = name_part(gpus[0])
    return name if len(gpus) == 1 else f"{len(gpus)}x-{name}"


if __name__ == "__main__":
    sys.exit(main())
