"""Two ranks on gloo: they learn what one process learns, however the weights are shared out, and stop together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from serin.artifacts import Dataset
from serin.errors import Preempted
from serin.formats.weights import read_weights
from serin.spec.stages import ModelSpec, TrainingSpec
from serin.training.job import TrainingJob
from tests.fakes.datasets import make_dataset
from tests.unit.training.ranks import run_ranks, train_rank

TOLERANCE = 1e-4  # of an epoch's mean loss: the same sums in another order


def train(
    folder: Path,
    dataset: Dataset,
    ranks: int,
    *,
    kind: str = "mlp",
    stop_at: int | None = None,
    **settings: object,
) -> list[int]:
    folder.mkdir(exist_ok=True)
    training = TrainingSpec(epochs=2, batch_rows=100, learning_rate=3e-3, **settings)  # type: ignore[arg-type]
    job = TrainingJob(
        model=ModelSpec(kind=kind, hidden=(32,), embedding=8, blocks=2, heads=2),  # type: ignore[arg-type]
        training=training,
        dataset=dataset.path,
        dataset_digest=dataset.digest,
        processes=ranks,
        gpu=False,
    )
    return run_ranks(ranks, train_rank, job.model_dump_json(), folder, stop_at)


def losses(folder: Path) -> list[float]:
    epochs = json.loads((folder / "result" / "metrics.json").read_text())["epochs"]
    return [epoch["loss"] for epoch in epochs]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mlp", {"strategy": "ddp", "accumulate": 2, "clip_norm": 1.0}),
        ("mlp", {"strategy": "ddp", "embedding_updates": "rows"}),
        ("mlp", {"strategy": "fsdp", "clip_norm": 1.0}),
        ("ft_transformer", {"strategy": "fsdp"}),
    ],
    ids=["ddp", "ddp-rows", "fsdp", "fsdp-transformer"],
)
def test_two_ranks_have_the_loss_curve_of_one(tmp_path: Path, kind: str, settings: dict) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 1000, "valid": 301, "test": 200})
    alone = {name: value for name, value in settings.items() if name not in ("strategy", "accumulate")}
    assert train(tmp_path / "one", dataset, 1, kind=kind, **alone) == [0]
    assert train(tmp_path / "two", dataset, 2, kind=kind, **settings) == [0, 0]
    difference = max(
        abs(a - b) for a, b in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True)
    )
    print("largest difference of an epoch's loss", difference)
    assert difference < TOLERANCE


def test_sharded_ranks_that_were_stopped_end_with_the_same_weights(tmp_path: Path) -> None:
    """One rank alone is asked; both save and stop at the same step, and go on from there."""
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 1000, "valid": 300, "test": 0})
    stopped = train(tmp_path / "run", dataset, 2, strategy="fsdp", stop_at=1, checkpoint_every_steps=3)
    assert stopped == [Preempted.exit_code] * 2
    assert train(tmp_path / "run", dataset, 2, strategy="fsdp", checkpoint_every_steps=3) == [0, 0]
    assert train(tmp_path / "whole", dataset, 2, strategy="fsdp") == [0, 0]
    ours, theirs = (read_weights(tmp_path / name / "result").state for name in ("run", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
