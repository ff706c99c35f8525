"""python -m benchmarks.quality [--full] [--jobs N] ...: the quality benchmark with contenders side by side."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks.quality.benchmark import PEERS, measure
from benchmarks.report import show, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all data sets and the networks among the peers")
    parser.add_argument("--jobs", type=int, default=1, help="contenders that run at the same time")
    parser.add_argument("--budget", type=float, help="seconds for each contender on each data set")
    parser.add_argument("--only", default="", help="data sets, separated by commas")
    parser.add_argument("--peers", type=Path, default=PEERS, help="the peers' interpreter")
    parser.add_argument("--partial", type=Path, help="a file for the scores so far")
    parser.add_argument("--json", type=Path, help="a file for the result")
    given = parser.parse_args()
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the contenders

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", file=sys.stderr, flush=True)

    report = measure(
        full=given.full,
        say=say,
        only=tuple(filter(None, given.only.split(","))),
        budget=given.budget,
        jobs=given.jobs,
        peers=given.peers,
        partial=given.partial,
    )
    if given.json:
        write(report, given.json)
    print(show(report))


if __name__ == "__main__":
    main()
