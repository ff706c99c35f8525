"""Contenders of the trees benchmark: the same rounds of XGBoost from the same shards.

Serin's iterator over the shards, a pandas data frame, and as the limit an array that is already in the memory of the
device. Each answers with its AUC on the valid rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clock import Watch
from serin.formats.dataset import read_dataset
from serin.formats.shards import read_split
from serin.models.trees import column_types, joined, load_xgboost
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.data.tree_matrix import features_on, quantile_matrix, sizes_of
from serin.training.launch.job import TrainingJob
from serin.training.programs.grow_trees import tree_settings

_kept: dict[str, Any] = {}


def run(request: dict[str, Any]) -> dict[str, Any]:
    matrices = {"ours": ours, "pandas": pandas_frame, "limit": limit}[request["who"]]
    job = _job(request)
    settings = {**tree_settings(job, read_dataset(job.dataset)), "nthread": request["threads"]}
    prepared = _in_memory(request) if request["who"] == "limit" else None
    watch = Watch()
    train, valid = matrices(request, job, prepared)
    loaded = watch.read()["seconds"]
    booster = load_xgboost().Booster(settings, [train, valid])
    for number in range(request["rounds"]):
        booster.update(train, number)
    auc = float(booster.eval_set([(valid, "valid")], request["rounds"]).rpartition(":")[2])
    return {**watch.read(), "loaded_s": loaded, "auc": auc}


def ours(request: dict[str, Any], job: TrainingJob, _: Any) -> tuple[Any, Any]:
    data, device = read_dataset(job.dataset), request["device"]
    train = quantile_matrix(job, data, "train", device=device)
    return train, quantile_matrix(job, data, "valid", like=train, device=device)


def pandas_frame(_request: dict[str, Any], job: TrainingJob, _: Any) -> tuple[Any, Any]:
    """The usual way: one data frame for each split, and a QuantileDMatrix from it."""
    import pandas as pd

    xgboost, data = load_xgboost(), read_dataset(job.dataset)
    types, made = column_types(len(data.numeric), sizes_of(data)), []
    for split in ("train", "valid"):
        rows = read_split(job.dataset, split).whole()
        frame = pd.DataFrame(joined(rows.num, rows.cat))
        like = made[0] if made else None
        made.append(
            xgboost.QuantileDMatrix(
                frame, np.asarray(rows.target), feature_types=types, enable_categorical=True, ref=like
            )
        )
    return made[0], made[1]


def limit(_request: dict[str, Any], job: TrainingJob, prepared: Any) -> tuple[Any, Any]:
    xgboost, data = load_xgboost(), read_dataset(job.dataset)
    types = column_types(len(data.numeric), sizes_of(data))
    train = xgboost.QuantileDMatrix(*prepared["train"], feature_types=types, enable_categorical=True)
    valid = xgboost.QuantileDMatrix(
        *prepared["valid"], feature_types=types, enable_categorical=True, ref=train
    )
    return train, valid


def _in_memory(request: dict[str, Any]) -> Any:
    if "limit" not in _kept:
        _kept["limit"] = {
            split: (features_on(request["device"])(rows.num, rows.cat), np.asarray(rows.target))
            for split in ("train", "valid")
            for rows in [read_split(request["dataset"], split).whole()]
        }
    return _kept["limit"]


def _job(request: dict[str, Any]) -> TrainingJob:
    digest = json.loads((Path(request["dataset"]) / "dataset.json").read_text())["digest"]
    return TrainingJob(
        model=ModelSpec(kind="xgboost", rounds=request["rounds"]),
        training=TrainingSpec(),
        dataset=request["dataset"],
        dataset_digest=digest,
        processes=1,
        gpu=request["device"] != "cpu",
    )
