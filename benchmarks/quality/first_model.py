"""Compares the two models that a draft may propose, trees and a network, each with the features a draft gives it.

`python -m benchmarks.quality.first_model [FILE:TARGET ...]` trains both on scikit-learn's tables and on the Parquet
files named, three times with different seeds, and prints the test metrics. No search: drafts have none either.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

import serin
from serin.draft import guess
from serin.spec.yaml_file import read_yaml

SEEDS = (1, 2, 3)
_FEW_ROWS = 50_000  # below, a network needs more than the usual epochs


def main() -> None:
    os.environ["SERIN_HOME"] = tempfile.mkdtemp(prefix="serin-first-model-")
    print("| table | rows | metric | xgboost | mlp |\n|---|---|---|---|---|")
    for name, table, target in _tables(sys.argv[1:]):
        found = {kind: _metrics(name, table, target, kind) for kind in ("xgboost", "mlp")}
        metric = next(key for key in ("test_auc", "test_accuracy", "test_rmse") if key in found["mlp"][0])
        scores = {kind: [each[metric] for each in runs] for kind, runs in found.items()}
        cells = " | ".join(
            f"{np.mean(values):.4f} ± {np.std(values):.4f}" for values in (scores["xgboost"], scores["mlp"])
        )
        rows = f"{len(table):,}"
        print(f"| {name} | {rows} | {metric.removeprefix('test_')} | {cells} |", flush=True)


def _metrics(name: str, table: pd.DataFrame, target: str, kind: str) -> list[dict[str, float]]:
    usual = guess.TREE_CLASSES
    guess.TREE_CLASSES = 10**9 if kind == "xgboost" else -1
    try:
        drafted = serin.Pipeline.draft(table, target=target, name=f"{name}-{kind}".lower().replace("_", "-"))
    finally:
        guess.TREE_CLASSES = usual
    spec = read_yaml(drafted.to_yaml())
    assert spec["model"]["kind"] == kind
    epochs = {"epochs": 20} if kind == "mlp" and len(table) < _FEW_ROWS else {}
    return [
        dict(serin.Pipeline({**spec, "training": {"seed": seed, **epochs}}).train().metrics) for seed in SEEDS
    ]


def _tables(files: list[str]) -> Iterator[tuple[str, pd.DataFrame, str]]:
    from sklearn import datasets

    for name in ("breast_cancer", "diabetes", "wine", "digits"):
        yield name, getattr(datasets, f"load_{name}")(as_frame=True).frame, "target"
    for each in files:
        path, _, target = each.partition(":")
        yield Path(path).stem, pd.read_parquet(path), target


if __name__ == "__main__":
    main()
