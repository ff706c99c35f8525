"""python -m benchmarks.check: has a part become slower than the committed ratios say? At most five minutes.

Each ratio, ours against a reference in the same rounds, is compared with those of benchmarks/results/check-<kind of
machine>.json. A ratio that seems to have fallen is measured once more; only a loss that both measurements show fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.check.kept import KeptRatios, newest, read_kept, write_kept
from benchmarks.check.measure import CHECKS, Check, Ratios, measure_all
from benchmarks.check.statistics import Change, compare
from benchmarks.machine import kind_of_machine
from benchmarks.suite.parts import ROOT

Say = Callable[[str], None]
_RUNS = 5  # of each ratio, that are committed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__)
    names = [check.benchmark for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these benchmarks only")
    parser.add_argument(
        "--keep", action="store_true", help="add this run to the committed ratios (the newest five are kept)"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--commit", default="", help="the commit under test, where there is no git")
    chosen = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    path = chosen.results / f"check-{kind_of_machine()}.json"
    checks = [check for check in CHECKS if check.benchmark in chosen.only]
    if chosen.keep:
        run = KeptRatios(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=chosen.commit,
            ratios=measure_all(checks, say),
        )
        write_kept(path, newest([*read_kept(path), run], _RUNS))
        print(f"added to {path}")
        return 0
    kept = read_kept(path)
    if not kept:
        print(
            f"no committed ratios for this kind of machine ({path.name}); "
            "run `python -m benchmarks.check --keep` five times on a commit that is known to be good",
            file=sys.stderr,
        )
        return 2
    changes = judge(checks, kept, say)
    print(show(changes))
    lost = [name for name, change in changes.items() if change.verdict == "lost"]
    print(f"lost: {', '.join(lost)}" if lost else "no loss")
    return 1 if lost else 0


def judge(checks: list[Check], kept: list[KeptRatios], say: Say) -> dict[str, Change]:
    """Compares every ratio; those that seem to have fallen with a second measurement alone, which decides."""
    changes = changes_of(measure_all(checks, say), kept)
    suspects = {name for name, change in changes.items() if change.verdict == "lost"}
    again = [check for check in checks if any(name.split()[0] == check.benchmark for name in suspects)]
    if again:
        say(f"seems to have fallen, measured again: {', '.join(sorted(suspects))}")
        second = changes_of(measure_all(again, say), kept)
        changes |= {name: second[name] for name in suspects}
    return changes


def changes_of(now: Ratios, kept: list[KeptRatios]) -> dict[str, Change]:
    """Ratios that the committed runs do not have are left out."""
    earlier = {name: [run.ratios[name] for run in kept if name in run.ratios] for name in now}
    return {name: compare(earlier[name], rounds) for name, rounds in now.items() if earlier[name]}


def show(changes: Mapping[str, Change]) -> str:
    header = f"{'ratio':<34}{'now over committed':>28}  verdict"
    rows = [f"{name:<34}{change!s:>28}  {change.verdict}" for name, change in changes.items()]
    return "\n".join([header, "-" * len(header), *rows])


if __name__ == "__main__":
    sys.exit(main())
