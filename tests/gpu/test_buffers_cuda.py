"""Buffers that change in a step on a real GPU, captured and not. Skipped, with the reason, where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from serin.formats.shards import read_split
from serin.models.build import load_model
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.data.tables import open_table
from serin.training.engine.evaluate import evaluate
from serin.training.launch.job import TrainingJob
from serin.training.parallel.ranks import Ranks
from serin.training.programs import worker
from tests.fakes.datasets import SIZES, make_dataset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, numeric, sizes, outputs, replaced):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(numeric, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs))
        self.register_buffer("center", torch.zeros(numeric), persistent=False)
        self.replaced = replaced

    def forward(self, num, cat):
        if self.training:
            moved = 0.8 * self.center + 0.2 * num.detach().mean(0)
            if self.replaced:
                self.center = moved
            else:
                self.center.copy_(moved)
        return self.layers(num - self.center)
"""


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("batch_rows", [100, "auto"])
def test_the_metrics_on_a_gpu_are_those_of_the_saved_weights(
    replaced: bool, batch_rows: int | str, tmp_path: Path
) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 60_000, "valid": 800, "test": 800})
    (tmp_path / "net.py").write_text(NET)
    job = TrainingJob(
        model=ModelSpec(module=f"{tmp_path / 'net.py'}:Net", options={"replaced": replaced}),
        training=TrainingSpec(epochs=2, batch_rows=batch_rows, precision="fp32", execution="cuda_graph"),
        dataset=dataset.path,
        dataset_digest="",
        processes=1,
        gpu=True,
    )
    (tmp_path / "run").mkdir()
    worker.train(job, tmp_path / "run", Ranks(rank=0, size=1, device=torch.device("cuda", 0)), lambda: False)
    choices = json.loads((tmp_path / "run" / "choices.json").read_text())
    assert choices["execution"] == ("eager" if replaced else "cuda_graph")
    assert ("network.center is replaced" in choices["execution_reason"]) is replaced
    network = load_model(tmp_path / "run" / "result")
    steps = json.loads((tmp_path / "run" / "result" / "state.json").read_text())["step"]
    assert int(network.get_buffer("network.layers.1.num_batches_tracked")) == steps
    cpu = torch.device("cpu")
    table = open_table(read_split(dataset.path, "test"), cpu, sizes=SIZES)
    found = evaluate(network, table, "binary", Ranks(rank=0, size=1, device=cpu))
    reported = json.loads((tmp_path / "run" / "result" / "metrics.json").read_text())["metrics"]
    print({name: value - reported[f"test_{name}"] for name, value in found.items()})
    assert found == pytest.approx({name: reported[f"test_{name}"] for name in found}, abs=1e-4)
