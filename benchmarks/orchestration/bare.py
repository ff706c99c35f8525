"""The stages without an orchestrator, in one process: python -m benchmarks.orchestration.bare SPEC"""

from __future__ import annotations

import sys

from serin.commands.stages import publish_model, train_model
from serin.spec.load import load_spec


def quiet(_: str) -> None:
    """Nobody listens."""


def main() -> None:
    spec = load_spec(sys.argv[1])
    train_model(spec, say=quiet)  # makes the dataset first
    bundle = publish_model(spec, say=quiet)
    print(f"{bundle.model} {bundle.version}")


if __name__ == "__main__":
    main()
