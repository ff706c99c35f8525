"""Work by columns: function calls are counted, which repeat where seconds do not."""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

import numpy as np
import pandas as pd

from serin.etl.build import build_dataset
from serin.spec.load import load_spec
from serin.store.store import Store

FEW, TIMES, ROWS = 60, 4, 300


def calls_by_function(folder: Path, columns: int) -> dict[str, int]:
    """The calls of each function while a table with so many numeric columns is built."""
    folder.mkdir()
    random = np.random.default_rng(3)
    table = pd.DataFrame(
        {f"x{number}": random.standard_normal(ROWS, np.float32) for number in range(columns)}
    )
    table.assign(c=[f"v{n % 7}" for n in range(ROWS)], y=table["x0"] > 0).to_parquet(folder / "t.parquet")
    steps = ["fill_median", "normalize"]
    spec = load_spec(
        {
            "name": "wide",
            "data": {
                "tables": {"main": str(folder / "t.parquet")},
                "target": {"expression": "y", "task": "binary"},
            },
            "features": [
                {"columns": [f"x{number}" for number in range(columns)], "steps": steps},
                {"columns": ["c"], "steps": ["categorify"]},
            ],
            "etl": {"engine": "process"},
        }
    )
    profile = cProfile.Profile()
    profile.enable()
    build_dataset(spec.data, spec.features, spec.etl, store=Store(str(folder / "store")))
    profile.disable()
    found = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return {f"{Path(file).name}:{line} {name}": calls for (file, line, name), (calls, *_) in found.items()}


def test_four_times_the_columns_are_four_times_the_calls(tmp_path: Path) -> None:
    calls_by_function(tmp_path / "first", FEW)  # reads the libraries
    few, many = (calls_by_function(tmp_path / str(count), count) for count in (FEW, FEW * TIMES))
    assert sum(many.values()) < 1.2 * TIMES * sum(few.values())
    steep = {
        name: (few.get(name, 0), count)
        for name, count in many.items()
        if count > 5000 and count > 1.5 * TIMES * few.get(name, 0)
    }
    assert not steep, "calls that grow faster than the columns"
