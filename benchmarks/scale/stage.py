"""Runs one stage in a host, and prints what it cost: `python -m benchmarks.scale.stage etl|train SPEC [MACHINES]`.

The home must be one that was never used.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from serin.machine import environment
from serin.pipeline.run_stage import run_etl, run_train
from serin.spec.load import load_spec
from serin.store.receipt import Receipt
from serin.training.launch.machines import machines_told


def main(stage: str, spec: str, machines: str = "1") -> None:
    loaded = load_spec(Path(spec))
    if stage == "etl":
        built = run_etl(loaded)
        result, receipt = built.value.digest, built.receipt
    else:
        trained = run_train(loaded, machines=machines_told(count=machines))
        weights = Path(trained.value.path) / "weights.safetensors"
        result, receipt = hashlib.sha256(weights.read_bytes()).hexdigest(), _of_training()
    facts: dict[str, Any] = {"result": result, "receipt": None}
    if receipt is not None:
        facts["receipt"] = {"seconds": receipt.seconds, "rows_per_s": receipt.rows_per_s}
    sys.stdout.write(f"\n{json.dumps(facts)}\n")


def _of_training() -> Receipt | None:
    """Returns the receipt of this host's training, if it says how fast that was. Hosts that train together name theirs
    by host and process."""
    found = (Receipt.load_file(path) for path in environment.home().rglob("receipt*.json"))
    fast = [each for each in found if each is not None and each.stage == "train" and each.rows_per_s]
    return fast[0] if fast else None


if __name__ == "__main__":
    main(*sys.argv[1:])
