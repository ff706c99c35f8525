"""The data sets of the quality benchmark, built by the ETL: every contender reads the same features and splits."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.child import ROOT, ContenderFailed
from benchmarks.etl.cases import flights_3m, prepare_cases
from benchmarks.race import EVERYTHING
from serin.etl.build import build_dataset
from serin.formats.schema import Task
from serin.spec.load import load_spec
from serin.spec.pipeline import PipelineSpec
from serin.store.store import Store

DATA = ROOT / "benchmarks" / "data" / "quality"
FLIGHTS = ROOT / "examples" / "flights" / "spec.yaml"
TASKS: dict[str, Task] = {
    "adult": "binary", "bio": "binary", "lending": "binary", "credit": "binary", "churn": "binary",
    "flchain": "binary", "breast_cancer": "binary", "digits": "multiclass", "california": "regression",
    "diamonds": "regression",
}  # fmt: skip
DEVELOPMENT: dict[str, Task] = {
    "attrition": "binary", "wa_churn": "binary", "cells": "binary", "spam7": "binary", "stackoverflow": "binary",
    "hpc": "multiclass", "ames": "regression",
}  # fmt: skip
"""Data sets that settings are chosen by; the benchmark does not use them."""
FLIGHTS_TABLES = ("flights", "flights-3m")  # split by time
QUICK = ("credit", "churn", "breast_cancer")
_FLIGHTS_3M_ROWS = 300_000  # of the three million: every tenth, so that a contender can try several settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    name: str
    task: Task
    folder: str
    rows: int

    @property
    def metric(self) -> str:
        """All of them are higher for the better model, and 1 is perfect."""
        return {"binary": "AUC", "multiclass": "accuracy", "regression": "R2"}[self.task]


def task_of(name: str) -> Task:
    return (TASKS | DEVELOPMENT).get(name, "binary")


def prepare(
    scratch: Path, *, full: bool, peers: Path, say: Callable[[str], None], only: tuple[str, ...] = ()
) -> tuple[list[DataSet], list[str]]:
    """Returns the data sets that are available, and a note for each that is not."""
    wanted = only or ((*TASKS, *FLIGHTS_TABLES) if full else QUICK)
    tables = [name for name in wanted if name in TASKS]
    problems = {} if all((DATA / f"{name}.parquet").exists() for name in tables) else fetch_tables(peers)
    notes = [f"{name} was skipped: {problem}" for name, problem in problems.items() if name in wanted]
    specs = {name: table_spec(name) for name in tables if name not in problems}
    if set(wanted) & set(FLIGHTS_TABLES):
        found, more = _flights(peers, say)
        specs |= {name: spec for name, spec in found.items() if name in wanted}
        notes += more
    store, sets = Store(str(scratch / "store")), []
    for name, spec in specs.items():
        made = build_dataset(spec.data, spec.features, spec.etl, store=store)
        task = spec.data.target.task
        assert task is not None
        sets.append(DataSet(name=name, task=task, folder=made.path, rows=sum(made.rows.values())))
        say(f"{name}: {made.rows}")
    return sets, notes


def fetch_tables(peers: Path) -> dict[str, str]:
    """Writes the tables from packages of the peers' environment; returns what is missing, with the reason."""
    done = subprocess.run(
        [str(peers), "-m", "benchmarks.quality.fetch", str(DATA)],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if done.returncode != 0:
        raise ContenderFailed(f"the tables could not be written: {done.stderr[-2000:]}")
    problems: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return problems


def table_spec(name: str) -> PipelineSpec:
    path, task = DATA / f"{name}.parquet", task_of(name)
    schema = pq.read_schema(path)
    columns = [field.name for field in schema if field.name != "target"]
    words = [column for column in columns if str(schema.field(column).type) in ("string", "large_string")]
    numbers = [column for column in columns if column not in words]
    features: list[dict[str, Any]] = []
    if numbers:
        features.append({"columns": numbers, "steps": ["fill_median", "normalize"]})
    if words:
        features.append({"columns": words, "steps": ["categorify"]})
    target = {"expression": "target > 0" if task == "binary" else "target", "task": task}
    data = {
        "tables": {"rows": str(path)}, "target": target, "split": {"train": 0.7, "valid": 0.15, "test": 0.15},
    }  # fmt: skip
    return load_spec({"name": name.replace("_", "-"), "data": data, "features": features})


def _flights(peers: Path, say: Callable[[str], None]) -> tuple[dict[str, PipelineSpec], list[str]]:
    """Returns the two tables of flights, split by time."""
    found, notes, thin = {}, [], DATA / "flights-3m-thin.parquet"
    flights, case = FLIGHTS.parent / "data" / "flights.parquet", flights_3m()
    if not (flights.exists() and thin.exists()):
        cases, notes = prepare_cases(full=False, peers=peers, choice=EVERYTHING, say=say)
        if any(each.name == case.name for each in cases):
            DATA.mkdir(parents=True, exist_ok=True)
            every = pq.read_metadata(case.table).num_rows // _FLIGHTS_3M_ROWS
            table = pq.read_table(case.table)
            pq.write_table(table.take(list(range(0, table.num_rows, every))), thin)
    if flights.exists():
        found["flights"] = load_spec(FLIGHTS)
    if thin.exists():
        data = {
            "tables": {"rows": str(thin)},
            "time": case.time,
            "training_only": [case.target],
            "target": {"expression": f"{case.target} > {case.above}", "task": "binary"},
            "split": {"train": 0.7, "valid": 0.15, "test": 0.15},
        }
        features: list[dict[str, Any]] = [
            {"columns": case.numeric, "steps": ["fill_median", "normalize"]},
            {"columns": case.categorical, "steps": ["categorify"]},
            {"columns": [case.time], "steps": [{"date_parts": ["hour", "weekday"]}]},
        ]
        found["flights-3m"] = load_spec({"name": "flights-3m", "data": data, "features": features})
    return found, notes
