"""A small pipeline for hosts: a table, a spec, and the environment of a host."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

SERIN = (sys.executable, "-m", "serin.cli")
PREFECT = (sys.executable, "-m", "prefect", "--no-prompt")


def write_table(path: Path, rows: int, *, seed: int = 7) -> None:
    """Numbers with nulls, words and a target that depends on both."""
    lots = np.random.default_rng(seed)
    size, weight = lots.normal(size=rows), lots.gamma(2.0, size=rows)
    kind = lots.choice(["red", "green", "blue", "grey"], size=rows, p=[0.4, 0.3, 0.2, 0.1])
    late = size + 0.5 * weight + (kind == "red") + lots.normal(scale=0.5, size=rows) > 1.5
    columns = {
        "number": np.arange(rows),
        "size": pa.array(size, mask=lots.random(rows) < 0.05),
        "weight": weight,
        "kind": kind,
        "late": late.astype(np.int64),
    }
    pq.write_table(pa.table(columns), path, row_group_size=max(1, rows // 8))


def write_spec(
    folder: Path,
    *,
    name: str = "parcels",
    training: Mapping[str, object] = {},
    etl: Mapping[str, object] = {},
    search: Mapping[str, object] = {},
) -> Path:
    """pipeline.yaml beside data.parquet."""
    spec = {
        "name": name,
        "data": {
            "tables": {"parcels": "data.parquet"},
            "target": {"expression": "late", "task": "binary"},
            "split": {"train": 0.8, "valid": 0.1, "test": 0.1},
        },
        "features": [
            {"columns": ["size", "weight"], "steps": ["fill_median", "normalize"]},
            {"columns": ["kind"], "steps": [{"categorify": {"min_count": 2}}]},
        ],
        "model": {"kind": "mlp", "hidden": [16, 8]},
        "training": {"epochs": 2, "batch_rows": 120, "precision": "fp32", "execution": "eager", **training},
        "etl": dict(etl),
        "search": dict(search),
    }
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in spec.items() if value}, sort_keys=False))
    return path


def host_environment(home: Path, store: Mapping[str, str]) -> dict[str, str]:
    """What a command in a host sees: its own home, the common store, one thread per library."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ}
    return {**kept, "SERIN_HOME": str(home), "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1", **store}


def run_alone(folder: Path, *command: str | Path) -> dict[str, Any]:
    """What a stage returns on one machine, in a separate home."""
    own = host_environment(folder / "home-alone", {})
    done = subprocess.run(
        [*SERIN, *command, "--json"], env=own, stdout=subprocess.PIPE, text=True, check=True, timeout=400
    )
    return last_json(done.stdout)


def last_json(text: str) -> dict[str, Any]:
    """The JSON document at the end of a command's output, after lines of its log."""
    found: dict[str, Any] = json.loads(text[text.rindex("\n{") + 1 :] if "\n{" in text else text)
    return found
