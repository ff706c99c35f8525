"""A training from its start to its result, and how it ends when it cannot get there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from serin.errors import LossNotFinite, Preempted, TrainingRefused, WorkerFailed
from serin.formats.dataset import read_dataset
from serin.formats.shards import read_split
from serin.models.build import load_model
from serin.spec.training import TrainingSpec
from serin.training.launch import launcher
from serin.training.launch.job import Status, only_one
from serin.training.programs import worker
from tests.fakes.datasets import make_dataset
from tests.kit.waiting import until
from tests.logs import heard
from tests.unit.training.runs import ALONE, MODEL, is_alive, job_of, made, records, train_here

ROOT = Path(__file__).parents[3]

LEASHED = """
import os, sys
from serin.machine.parent_death import die_with_parent
die_with_parent(os.getppid())
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_a_process_on_the_leash_dies_with_its_parent() -> None:
    """kill -9 of a launcher must not leave workers on a GPU. A shell is the parent here."""
    parent = subprocess.Popen(
        ["/bin/sh", "-c", '"$0" -c "$1"; true', sys.executable, LEASHED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with parent:
        child = int(parent.stdout.readline())
        parent.kill()
        until(lambda: not is_alive(child), f"the end of process {child} after its parent's")


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    dataset, training = make_dataset(tmp_path / "dataset"), TrainingSpec(epochs=1)
    folder = tmp_path / "run"
    launcher._begin(job_of(MODEL, training, dataset), made(folder))
    worker.train(job_of(MODEL, training, dataset), folder, ALONE, lambda: False)
    said: list[str] = []
    with heard(said.append):
        checkpoint = launcher.train(MODEL, training, dataset, folder=folder)
    assert said == [f"already trained: {folder / 'result'}"]
    names = ("auc", "average_precision", "logloss")
    assert set(checkpoint.metrics) == {f"{split}_{name}" for split in ("valid", "test") for name in names}


def test_numbers_that_a_network_can_hardly_learn_from_are_noted(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 200}, numbers=1e5)
    split = read_split(dataset.path, "train")
    worker._warn_of_unscaled(read_dataset(dataset.path), split, made(tmp_path / "run"))
    (note,) = records(tmp_path / "run", "note")
    assert note["text"].startswith("not scaled for a network: a (")


def test_the_best_epoch_is_the_result(tmp_path: Path) -> None:
    """A learning rate that overfits a tiny table: later epochs get worse on the valid rows."""
    dataset = make_dataset(tmp_path / "dataset", rows={"train": 200, "valid": 800, "test": 0})
    train_here(MODEL, TrainingSpec(epochs=25, batch_rows=50, learning_rate=0.02), dataset, tmp_path / "run")
    epochs = [record["metrics"]["valid_auc"] for record in records(tmp_path / "run", "epoch")]
    result = json.loads((tmp_path / "run" / "result" / "metrics.json").read_text())["metrics"]
    assert result["valid_auc"] == max(epochs) > epochs[-1]
    assert "test_auc" not in result


@pytest.mark.parametrize(
    ("task", "metric", "outputs"), [("multiclass", "test_accuracy", 3), ("regression", "test_rmse", 1)]
)
def test_other_tasks_train_too(tmp_path: Path, task: str, metric: str, outputs: int) -> None:
    dataset = make_dataset(tmp_path / "dataset", task=task)
    train_here(MODEL, TrainingSpec(epochs=4, batch_rows=50, learning_rate=3e-3), dataset, tmp_path / "run")
    written = json.loads((tmp_path / "run" / "result" / "metrics.json").read_text())
    found, error = written["metrics"][metric], written["errors"][metric]
    assert 0 < error < 0.5 * found
    assert not any("error" in name for name in written["metrics"])
    assert found > 0.6 if task == "multiclass" else found < 11_000  # the noise alone is 9,000
    network = load_model(tmp_path / "run" / "result")
    scores = network(torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.int64))
    assert scores.shape == (2, outputs)


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "dataset", poison=True)
    with pytest.raises(
        LossNotFinite, match=r"the loss became (nan|inf) at step \d+; lower training"
    ) as caught:
        train_here(MODEL, TrainingSpec(epochs=3, checkpoint_every_steps=1), dataset, tmp_path / "run")
    saved = [record["step"] for record in records(tmp_path / "run", "checkpoint")]
    assert max(saved, default=0) < caught.value.fields["step"] <= 15


@pytest.mark.parametrize(
    ("status", "stop_asked", "error"),
    [
        (Status(state="preempted", step=3), False, Preempted),
        (None, True, Preempted),  # told to stop before the worker could listen
        (Status(state="diverged", step=3, loss="nan"), False, LossNotFinite),
        (Status(state="refused", reason="no"), False, TrainingRefused),
        (Status(state="failed", rank=1, exit_code=-9), False, WorkerFailed),
        (None, False, WorkerFailed),
    ],
)
def test_how_the_processes_ended_becomes_an_error(
    status: Status | None, stop_asked: bool, error: type[Exception], tmp_path: Path
) -> None:
    end = launcher._End(status=status, exit_code=1, stop_asked=stop_asked, log=tmp_path / "log")
    with pytest.raises(error):
        launcher._outcome(tmp_path, end)


def test_a_folder_with_another_training_is_refused_with_what_differs(tmp_path: Path) -> None:
    dataset, folder = make_dataset(tmp_path / "dataset"), made(tmp_path / "run")
    launcher._begin(job_of(MODEL, TrainingSpec(), dataset), folder)
    with pytest.raises(TrainingRefused, match="seed: 0 -> 1"):
        launcher.train(MODEL, TrainingSpec(seed=1), dataset, folder=folder)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    with (
        only_one(folder / "launch.lock", wait_s=0),
        pytest.raises(TrainingRefused, match="another process is training"),
    ):
        launcher.train(MODEL, TrainingSpec(), make_dataset(tmp_path / "dataset"), folder=folder)


@pytest.mark.parametrize(("processes", "each", "how"), [(2, 1, "one GPU each"), (3, 2, "2 on each GPU")])
def test_more_processes_than_leased_gpus_are_refused(
    tmp_path: Path, processes: int, each: int, how: str
) -> None:
    with pytest.raises(TrainingRefused, match=f"{how}, but 1 leased: GPU-a"):
        launcher.train(
            MODEL,
            TrainingSpec(processes=processes, processes_per_gpu=each),
            make_dataset(tmp_path / "dataset"),
            folder=tmp_path / "run",
            devices=("GPU-a",),
        )
