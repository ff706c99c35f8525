"""Two ranks on one GPU over gloo (NCCL refuses that): they learn what one rank learns, however the network is shared
out, and resume in any other way. It proves the code for several ranks on GPU tensors, not a speed-up. Skipped without a
GPU."""

import json
from pathlib import Path

import pytest
import torch

from serin.errors import Preempted, WorkerFailed
from serin.formats.weights import read_weights
from serin.machine.hardware import inventory
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.launch.launcher import train as launch
from tests.fakes.datasets import make_dataset
from tests.signals import hit
from tests.unit.training.parallel_cases import (
    CASES,
    TRANSFORMER,
    Case,
    difference,
    job,
    train,
    train_all,
)
from tests.unit.training.runs import at_the_next_checkpoint, choices

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not inventory(), reason="no GPU that torch can use"
)

TOLERANCE = 1e-3  # of an epoch's mean loss: sums on a GPU may come in another order


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("dataset")
    return make_dataset(folder / "dataset", rows={"train": 600, "valid": 301, "test": 200})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Dataset) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train_all(folder, dataset, CASES, gpu=True)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_on_one_gpu_have_the_loss_curve_of_one(trained: Path, name: str) -> None:
    found = difference(trained / f"{name}-1", trained / f"{name}-2")
    chosen = choices(trained / f"{name}-2")
    print(f"{name}: largest difference of an epoch's loss {found:.2g}, {chosen['execution']}")
    assert found < (1e-2 if "fp16" in name else TOLERANCE)
    assert (chosen["ranks"], chosen["device"]) == (2, "cuda")
    assert chosen["strategy"] == CASES[name].two["strategy"]
    assert chosen["execution"] == "eager"


@pytest.mark.timeout(400)
def test_two_ranks_measure_their_batch_together_and_learn(tmp_path: Path) -> None:
    many = make_dataset(tmp_path / "dataset", rows={"train": 200_000, "valid": 2000, "test": 2000})
    wanted = {"batch_rows": "auto", "precision": "auto", "strategy": "ddp"}
    train_all(tmp_path, many, {"auto": Case(two={})}, gpu=True, **wanted)
    for ranks in (1, 2):
        found = choices(tmp_path / f"auto-{ranks}")
        print(ranks, found["batch_rows"], found["batch_reason"], found["precision_reason"])
        assert "rows/s by rows per step: 256:" in found["batch_reason"]
        assert found["batch_rows"] % ranks == 0
        metrics = json.loads((tmp_path / f"auto-{ranks}" / "result" / "metrics.json").read_text())["metrics"]
        assert metrics["test_auc"] > 0.75


@pytest.mark.timeout(400)
def test_a_run_resumes_with_other_ranks_and_another_strategy(
    tmp_path: Path, dataset: Dataset, trained: Path
) -> None:
    """Tensor parallel, stopped; then FSDP, stopped; then one process to the end."""
    settings = {"clip_norm": 0.5, "checkpoint_every_steps": 3}
    folder = tmp_path / "run"
    for strategy in ("tensor", "fsdp"):
        made = job(tmp_path, dataset, 2, TRANSFORMER, gpu=True, strategy=strategy, **settings)
        assert train(made, folder, stop_at=1) == [Preempted.exit_code] * 2
    assert train(job(tmp_path, dataset, 1, TRANSFORMER, gpu=True, **settings), folder) == [0]
    found = difference(folder, trained / "tensor-transformer-1")
    print(f"largest difference of an epoch's loss {found:.2g}")
    assert found < TOLERANCE


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_ends_both_and_the_next_start_resumes_near_the_uninterrupted_run(
    tmp_path: Path, strategy: str
) -> None:
    """By the launcher and torchrun, with a lease's one device; the receipt counts both ranks on it."""
    gpu = inventory()[0]
    many = make_dataset(tmp_path / "dataset", rows={"train": 40_000, "valid": 2000, "test": 2000})
    model = ModelSpec(hidden=(64, 32))
    training = TrainingSpec(
        epochs=2,
        batch_rows=512,
        checkpoint_every_steps=20,
        precision="fp32",
        processes=2,
        processes_per_gpu=2,
        strategy=strategy,
    )
    with at_the_next_checkpoint(tmp_path / "run", hit), pytest.raises(WorkerFailed):
        launch(model, training, many, folder=tmp_path / "run", devices=(gpu.id,))
    resumed = launch(model, training, many, folder=tmp_path / "run", devices=(gpu.id,))
    whole = launch(model, training, many, folder=tmp_path / "whole", devices=(gpu.id,))
    ours, theirs = (read_weights(checkpoint.path).state for checkpoint in (resumed, whole))
    apart = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    print(f"largest difference of a weight {apart:.2g}")
    assert apart < 1e-3
    (cost,) = json.loads((tmp_path / "whole" / "receipt.json").read_text())["device"]
    assert cost["id"] == gpu.id
    assert cost["peak_bytes"] > 0
