"""A trace on demand, also of a run that is over soon."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.launch.job import TrainingJob
from serin.training.launch.progress import Follower
from serin.training.parallel.ranks import Ranks
from serin.training.programs import worker
from tests.fakes.datasets import make_dataset


def test_a_short_run_is_traced_and_says_where(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", rows={"train": 2000, "valid": 100})
    job = TrainingJob(
        model=ModelSpec(hidden=(8,)), training=TrainingSpec(epochs=2, batch_rows=500, execution="eager"),
        dataset=dataset.path, dataset_digest=dataset.digest, processes=1, gpu=False, profile=True,
    )  # fmt: skip
    follower = Follower(tmp_path)
    worker.train(job, tmp_path, Ranks(rank=0, size=1, device=torch.device("cpu")), lambda: False)
    (record,) = [record for record in follower.read() if record["event"] == "trace"]
    events = json.loads(Path(record["path"]).read_text())["traceEvents"]
    assert any("addmm" in str(event.get("name")) for event in events)
