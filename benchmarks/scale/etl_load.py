"""Contender of the scaling curves: the ETL on a generated table of a given size. Its time is CPU time.

CPU time of this process and its children, because a curve over sizes has no other contender in the same round that
would cancel what neighbours on the machine take.
"""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.etl.build import build_dataset
from serin.formats.dataset import read_dataset
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store

_GROUP_ROWS = 1_000_000


def run(request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["folder"])
    table = folder / "table.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    write_table(table, rows=request["rows"], columns=request["columns"], cardinality=request["cardinality"])
    spec = _spec(str(table), request["columns"])
    before = _cpu_s()
    dataset = build_dataset(spec.data, spec.features, spec.etl, store=Store(str(folder / "store")))
    seconds = _cpu_s() - before
    rows = sum(split.rows for split in read_dataset(Path(dataset.path)).splits.values())
    shutil.rmtree(folder)
    return {"seconds": seconds, "rows": rows}


def write_table(path: Path, *, rows: int, columns: int, cardinality: int) -> None:
    """Writes numeric columns, one column of strings with so many values, and a target, group by group."""
    random, writer = np.random.default_rng(5), None
    for start in range(0, rows, _GROUP_ROWS):
        count = min(_GROUP_ROWS, rows - start)
        made: dict[str, Any] = {
            f"x{number}": random.standard_normal(count, np.float32) for number in range(columns)
        }
        codes = random.integers(0, cardinality, count)
        made["c"] = pa.array(np.char.add("v", codes.astype("U9")))
        made["y"] = made["x0"] + codes / cardinality > random.standard_normal(count)
        group = pa.table(made)
        writer = writer or pq.ParquetWriter(path, group.schema)
        writer.write_table(group)
    assert writer is not None
    writer.close()


def _spec(table: str, columns: int) -> PipelineSpec:
    return load_spec(
        {
            "name": "curve",
            "data": {"tables": {"main": table}, "target": {"expression": "y", "task": "binary"}},
            "features": [
                {
                    "columns": [f"x{number}" for number in range(columns)],
                    "steps": ["fill_median", "normalize"],
                },
                {"columns": ["c"], "steps": [{"categorify": {"min_count": 1}}]},
            ],
            "etl": {"engine": "process"},
        }
    )


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)
