"""The stages as plain functions, one after the other in this process, without an orchestrator:
python -m benchmarks.orchestration.bare SPEC

The last line: seconds from the first call to the return of the last, without the start of this process."""

from __future__ import annotations

import sys
import time

from serin.commands.stages import publish_model, train_model
from serin.spec.load import load_spec


def quiet(_: str) -> None:
    """Nobody listens."""


def main() -> None:
    began = time.perf_counter()
    spec = load_spec(sys.argv[1])
    train_model(spec, say=quiet)  # makes the dataset first
    publish_model(spec, say=quiet)
    print(f"{time.perf_counter() - began:.3f}")


if __name__ == "__main__":
    main()
