"""Serin's contender: one training as the pipeline runs it, in this process; the best epoch on the valid rows is
kept."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from serin.formats.shards import read_split
from serin.models.build import load_model
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.launch.job import TrainingJob
from serin.training.parallel.ranks import Ranks
from serin.training.programs import worker


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Trains with `settings` given by their keys in a spec (`model.hidden`); with `test` it also scores the test
    rows."""
    gpu = bool(request.get("gpu"))
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    execution = "cuda_graph" if gpu else "eager"  # no choice by measurement here
    fixed = {"seed": request["seed"], "precision": "fp32", "execution": execution}
    sections: dict[str, dict[str, Any]] = {"model": {}, "training": fixed}
    for path, value in request["settings"].items():
        section, _, key = path.partition(".")
        sections[section][key] = value
    job = TrainingJob(
        model=ModelSpec(**sections["model"]), training=TrainingSpec(**sections["training"]),
        dataset=request["dataset"], dataset_digest="", processes=1, gpu=gpu, test=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        worker.train(job, folder, Ranks(rank=0, size=1, device=device), lambda: False)
        metrics = json.loads((folder / "result" / "metrics.json").read_text())["metrics"]
        network = load_model(folder / "result")
    answer: dict[str, Any] = {"valid_auc": metrics["valid_auc"]}
    if request["test"]:
        rows = read_split(request["dataset"], "test").whole()
        with torch.inference_mode():
            logits = network(torch.tensor(rows.num), torch.tensor(rows.cat).long())
        answer["scores"] = torch.sigmoid(logits)[:, 0].tolist()
    return answer
