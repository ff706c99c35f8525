"""A small table of trips with everything relational work can stumble over, and datasets built from it."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from serin.etl.build import build_dataset
from serin.formats.shards import read_split
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store

ROWS = 900
START = pd.Timestamp("2024-01-01")


def trips(rows: int = ROWS) -> pd.DataFrame:
    draw = np.random.default_rng(5)
    taxi = draw.choice(["t1", "t2", "t3", "ü4", None], rows, p=[0.3, 0.3, 0.2, 0.1, 0.1])
    fare = np.where(draw.random(rows) < 0.1, np.nan, draw.gamma(2.0, 7.0, rows)).astype(np.float32)
    fare[rows // 2] = 1e12  # one outlier
    return pd.DataFrame(
        {
            "trip": np.arange(rows) // 2 * 2,  # every id twice
            "taxi": taxi,
            "zone": draw.integers(0, 4, rows),
            "start": START + pd.to_timedelta(draw.integers(0, 60 * 24 * 30, rows) // 30 * 30, unit="min"),
            "fare": fare,
            "people": pd.array(
                np.where(draw.random(rows) < 0.1, None, draw.integers(1, 6, rows)), dtype="Int64"
            ),
            "tip": draw.gamma(1.0, 2.0, rows),
        }
    )


def rates() -> pd.DataFrame:
    times = START + pd.to_timedelta(np.arange(0, 30 * 24 * 60, 450), unit="min")
    table = pd.MultiIndex.from_product([range(3), times], names=["zone", "since"]).to_frame(index=False)
    table["rate"] = np.arange(len(table), dtype=float) / 8
    return table.sample(frac=1.0, random_state=1)


def spec_of(
    folder: Path, *, features: Any = None, frame: pd.DataFrame | None = None, **data: Any
) -> PipelineSpec:
    """Writes the tables and gives a spec over them; `data` replaces keys of the data section."""
    (trips() if frame is None else frame).to_parquet(folder / "trips.parquet", row_group_size=97)
    rates().to_parquet(folder / "rates.parquet")
    section: dict[str, Any] = {
        "tables": {"trips": str(folder / "trips.parquet")},
        "target": {"expression": "tip > 2", "task": "binary"},
        "time": "start",
    }
    chosen = features or [{"columns": ["fare"], "steps": ["fill_median", "normalize"]}]
    return load_spec({"name": "trips", "data": section | data, "features": chosen})


def table_spec(
    path: Path | str, target: str, *features: dict[str, Any], task: str = "binary", **data: Any
) -> PipelineSpec:
    """A spec over one table, whatever it is."""
    section = {"tables": {"t": str(path)}, "target": {"expression": target, "task": task}}
    return load_spec({"name": "t", "data": section | data, "features": list(features)})


def build(spec: PipelineSpec, store: Store, *, etl: EtlSpec | None = None, **options: Any) -> Any:
    etl = etl or EtlSpec(engine="process", workers=1)
    return build_dataset(spec.data, spec.features, etl, store=store, **options)


def whole(path: str) -> tuple[Any, Any, Any]:
    """num, target and row ids of all splits, in order of row id."""
    parts = [read_split(path, split).whole() for split in ("train", "valid", "test")]
    num, target, rows = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("num", "target", "rows")
    )
    order = np.argsort(rows)
    return num[order], target[order], rows[order]
