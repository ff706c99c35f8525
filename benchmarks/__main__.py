"""python -m benchmarks NAME [--full] [--json FILE]: runs Serin, its best peers and the limit in turns."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from pathlib import Path

from benchmarks.child import ContenderFailed
from benchmarks.race import Unequal
from benchmarks.report import show, write

BENCHMARKS = {
    "bulk": "benchmarks.bulk.benchmark",
    "claims": "benchmarks.claims.benchmark",
    "elastic": "benchmarks.elastic.benchmark",
    "etl": "benchmarks.etl.benchmark",
    "hosts": "benchmarks.scale.hosts_benchmark",
    "loader": "benchmarks.loader.benchmark",
    "online": "benchmarks.online.benchmark",
    "orchestration": "benchmarks.orchestration.benchmark",
    "parallel": "benchmarks.parallel.benchmark",
    "quality": "benchmarks.quality.benchmark",
    "rollout": "benchmarks.rollout.benchmark",
    "runtime": "benchmarks.runtime.benchmark",
    "scale": "benchmarks.scale.benchmark",
    "serving": "benchmarks.serving.benchmark",
    "training": "benchmarks.training.benchmark",
    "trees": "benchmarks.trees.benchmark",
    "watch": "benchmarks.watch.benchmark",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument(
        "--full", action="store_true", help="more data and repetitions: up to 15 minutes instead of two"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every lap and the environment to FILE"
    )
    chosen = parser.parse_args(arguments)
    begin = time.monotonic()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # runs the clean-up of contenders and scratch files

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:5.0f} s] {text}", file=sys.stderr, flush=True)

    try:
        report = importlib.import_module(BENCHMARKS[chosen.name]).measure(full=chosen.full, say=say)
    except (ContenderFailed, Unequal) as error:
        print(f"no figures: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        write(report, chosen.json)
    print(show(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
