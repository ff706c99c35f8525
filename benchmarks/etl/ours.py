"""Serin's contender: build_dataset in one process, as `serin etl` calls it. Each run gets an empty store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from serin.etl.build import build_dataset
from serin.formats.dataset import read_dataset
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store


def run(request: dict[str, Any]) -> dict[str, Any]:
    spec = spec_of(request["case"], request.get("engine", "process"), request.get("workers", "auto"))
    memory_limit_bytes = psutil.virtual_memory().available // 2  # the ETL's memory budget
    dataset = build_dataset(spec.data, spec.features, spec.etl, store=Store(request["out"]))
    description = read_dataset(Path(dataset.path))
    return {
        "path": dataset.path,
        "memory_limit_bytes": memory_limit_bytes,
        "numeric": list(description.numeric),
        "categorical": [category.name for category in description.categorical],
    }


def spec_of(case: dict[str, Any], engine: str, workers: int | str) -> PipelineSpec:
    """Returns the pipeline that does the work of a case."""
    joins = [
        {"with": name, "on": join["on"], "columns": join["columns"], "source": "request"}
        for name, join in case["joins"].items()
    ]
    return load_spec(
        {
            "name": f"benchmark-{case['name']}",
            "data": {
                "tables": {"main": case["table"]}
                | {name: join["path"] for name, join in case["joins"].items()},
                "joins": joins,
                "derived": {name: f"{one} - {other}" for name, (one, other) in case["differences"].items()},
                "target": {"expression": f"{case['target']} > {case['above']}", "task": "binary"},
                "time": case["time"],
            },
            "features": [
                {"columns": case["numeric"], "steps": ["fill_median", "normalize"]},
                {"columns": case["categorical"], "steps": [{"categorify": {"min_count": case["min_count"]}}]},
                {"columns": [case["time"]], "steps": [{"date_parts": ["hour", "weekday"]}]},
            ],
            "etl": {"engine": engine, "workers": workers},
        }
    )
