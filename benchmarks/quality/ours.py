"""Ours: the flights example's model and training as its spec says, in this process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from serin.formats.shards import read_split
from serin.models.build import load_model
from serin.spec.stages import ModelSpec, TrainingSpec
from serin.training import worker
from serin.training.job import TrainingJob
from serin.training.world import World


def run(request: dict[str, Any]) -> dict[str, Any]:
    job = TrainingJob(
        model=ModelSpec(**request["model"]), training=TrainingSpec(**request["training"]),
        dataset=request["dataset"], dataset_digest="", processes=1, gpu=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        worker.train(job, folder, World(rank=0, size=1, device=torch.device("cpu")), lambda: False)
        network = load_model(folder / "result")
    test = read_split(request["dataset"], "test").whole()
    with torch.inference_mode():
        logits = network(torch.tensor(test.num), torch.tensor(test.cat).long())
    return {"scores": torch.sigmoid(logits)[:, 0].tolist()}
