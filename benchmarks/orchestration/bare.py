"""Runs the stages as plain functions, one after the other in this process, without an orchestrator.

    python -m benchmarks.orchestration.bare SPEC

The last line gives the seconds from the first call to the return of the last, without process start-up.
"""

from __future__ import annotations

import sys
import time

from serin.pipeline.run_stage import run_export, run_train
from serin.spec.load import load_spec


def main() -> None:
    began = time.perf_counter()
    spec = load_spec(sys.argv[1])
    run_train(spec)  # builds the dataset first
    run_export(spec)
    print(f"{time.perf_counter() - began:.3f}")


if __name__ == "__main__":
    main()
