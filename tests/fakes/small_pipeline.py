"""A pipeline that is whole and small: a table of a few thousand rows with an answer in it, and the spec for it."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from serin.spec.kind_settings import without_unused

NAME = "late-parcels"


def small_spec(folder: Path, *, rows: int = 3000, **sections: dict[str, Any]) -> dict[str, Any]:
    """The spec as a mapping; `folder` gets its table. Keyword arguments replace whole sections; of the training, the
    model's kind is told what it uses."""
    path = folder / "parcels.parquet"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(parcels(rows), path)
    usual: dict[str, Any] = {
        "name": NAME,
        "data": {
            "tables": {"parcels": str(path)},
            "target": {"expression": "hours > 30", "task": "binary"},
            "split": {"train": 0.8, "valid": 0.1, "test": 0.1},
        },
        "features": [
            {"columns": ["weight", "distance"], "steps": ["fill_median", "normalize"]},
            {"columns": ["carrier"], "steps": [{"categorify": {"min_count": 2}}]},
        ],
        "model": {"hidden": [8]},
        "training": {"epochs": 2, "batch_rows": 64, "learning_rate": 0.02, "seed": 3, "precision": "fp32"},
        "objectives": {"latency_ms": 500},
        "rollout": {
            "steps": [50, 100],
            "step_time": "1s",
            "min_requests": 1,
            "warmup": "0s",
            "bake": "1s",
            "deadline": "30s",
        },
    }
    return {**without_unused({**usual, "model": sections.get("model", usual["model"])}), **sections}


def with_lookup(spec: dict[str, Any], carriers: Path) -> dict[str, Any]:
    """The spec with the hours that a carrier adds in the place of the carrier, looked up in the model. `carriers`: the
    table of `write_carriers`."""
    data = spec["data"]
    joined = {"with": "carriers", "on": ["carrier"], "columns": ["extra"], "source": "lookup"}
    return {
        **spec,
        "data": {**data, "tables": {**data["tables"], "carriers": str(carriers)}, "joins": [joined]},
        "features": [{"columns": ["weight", "distance", "extra"], "steps": ["fill_median", "normalize"]}],
    }


def write_carriers(path: Path, *, slow: float = 18.0, more: tuple[str, ...] = ()) -> None:
    """`slow`: the hours that the slow carrier adds; `more`: names of further ones."""
    names = ["swift", "steady", "slow", *more]
    pq.write_table(pa.table({"carrier": names, "extra": [0.0, 6.0, slow, *[9.0] * len(more)]}), path)


def write_spec(folder: Path, spec: dict[str, Any]) -> Path:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


def parcels(rows: int, seed: int = 11, *, drifted: bool = False) -> pa.Table:
    """`drifted`: heavier parcels, and some that come by a new carrier."""
    chance = np.random.default_rng(seed)
    weight = chance.gamma(2.0, 4.5 if drifted else 3.0, rows).astype(np.float32)
    distance = chance.integers(1, 2000, rows)
    shares = {"swift": 0.4, "steady": 0.3, "slow": 0.1, "drone": 0.2} if drifted else None
    shares = shares or {"swift": 0.5, "steady": 0.4, "slow": 0.1}
    carrier = chance.choice(list(shares), rows, p=list(shares.values()))
    extra = np.select([carrier == "swift", carrier == "steady"], [0, 6], 18)
    hours = distance / 60 + weight / 4 + extra + chance.normal(0, 4, rows)
    return pa.table(
        {
            "weight": pa.array(np.where(chance.random(rows) < 0.02, np.nan, weight), from_pandas=True),
            "distance": distance,
            "carrier": carrier.tolist(),
            "hours": hours,
        }
    )
