"""Real trainings: torchrun, real processes, real signals. Each start costs seconds, so each test tells a long story."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from serin.artifacts import Dataset
from serin.errors import LossNotFinite, Preempted, TrainingRefused, WorkerFailed
from serin.formats.weights import read_weights
from serin.models.build import load_model
from serin.spec.stages import ModelSpec, TrainingSpec
from serin.training import launch, worker
from serin.training.files import only_one
from serin.training.job import TrainingJob
from serin.training.progress import Follower
from serin.training.status import Status
from serin.training.world import World
from tests.fakes.datasets import make_dataset
from tests.unit.training.ranks import run_ranks, train_rank

MODEL = ModelSpec(hidden=(64, 32), dropout=0.1)
ALONE = World(rank=0, size=1, device=torch.device("cpu"))
ROOT = Path(__file__).parents[3]
WAIT_S = 60.0

LEASHED = """
import os, sys
from serin.training.lifeline import die_with_parent
die_with_parent(os.getppid())
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def seldom_saved(training: TrainingSpec) -> TrainingSpec:
    return TrainingSpec(**{**training.model_dump(), "checkpoint_every_steps": "auto"})


def train_here(
    model: ModelSpec,
    training: TrainingSpec,
    dataset: Dataset,
    folder: Path,
    stop_asked: Callable[[], bool] = lambda: False,
) -> Status:
    """The same training in this process, without torchrun."""
    folder.mkdir(exist_ok=True)
    job = TrainingJob(
        model=model,
        training=training,
        dataset=dataset.path,
        dataset_digest=dataset.digest,
        processes=1,
        gpu=False,
    )
    return worker.train(job, folder, ALONE, stop_asked)


@contextmanager
def at_the_next_checkpoint(folder: Path, act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the first rank's process id as soon as the run in `folder` has saved something new."""
    folder.mkdir(exist_ok=True)
    follower, over = Follower(folder), threading.Event()

    def watch() -> None:
        deadline, pid = time.monotonic() + WAIT_S, 0
        while not over.wait(0.005) and time.monotonic() < deadline:
            for record in follower.read():
                pid = record.get("pid", pid)
                if record["event"] == "checkpoint" and not over.is_set():
                    over.set()
                    act(pid)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_9(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def ask_this_process_to_stop(_pid: int) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "progress.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def assert_same_bits(one: Path, other: Path) -> None:
    ours, theirs = (read_weights(folder / "result").state for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (one / "result" / "metrics.json").read_text() == (other / "result" / "metrics.json").read_text()


@pytest.mark.timeout(400)  # two starts of torchrun
def test_two_ranks_end_with_the_same_weights_when_one_of_them_was_killed(tmp_path: Path) -> None:
    """A worker killed with -9, then left alone: bit for bit the uninterrupted run."""
    dataset, folder, reference = make_dataset(tmp_path / "dataset"), tmp_path / "run", tmp_path / "reference"
    training = TrainingSpec(
        epochs=4, batch_rows=50, learning_rate=3e-3, checkpoint_every_steps=20, processes=2
    )
    said: list[str] = []

    with pytest.raises(WorkerFailed) as failed, at_the_next_checkpoint(folder, kill_9):
        launch.train(MODEL, training, dataset, folder=folder)
    checkpoint = launch.train(MODEL, training, dataset, folder=folder, say=said.append)
    job = launch._job(MODEL, seldom_saved(training), dataset, (), reference)
    run_ranks(2, train_rank, job.model_dump_json(), _made(reference), None)

    resumed_at = [record["step"] for record in records(folder, "started")]
    print("resumed at steps", resumed_at)
    assert resumed_at[0] == 0 < resumed_at[1]
    assert failed.value.fields["code"] == -signal.SIGKILL
    assert "SIGKILL" in failed.value.fields["reason"]
    assert "2 processes" in said[0]
    assert f"resumed at step {resumed_at[1]}" in said[0]
    assert_same_bits(folder, reference)
    assert checkpoint.metrics["test_auc"] > 0.75


def test_one_process_that_was_told_to_stop_and_then_killed_ends_with_the_same_weights(tmp_path: Path) -> None:
    """SIGTERM to the launcher, then kill -9 of its worker, then left alone."""
    dataset, folder, reference = make_dataset(tmp_path / "dataset"), tmp_path / "run", tmp_path / "reference"
    training = TrainingSpec(epochs=8, batch_rows=50, learning_rate=3e-3, checkpoint_every_steps=20)
    with pytest.raises(Preempted) as stopped, at_the_next_checkpoint(folder, ask_this_process_to_stop):
        launch.train(MODEL, training, dataset, folder=folder)
    with pytest.raises(WorkerFailed, match="SIGKILL"), at_the_next_checkpoint(folder, kill_9):
        launch.train(MODEL, training, dataset, folder=folder)
    launch.train(MODEL, training, dataset, folder=folder)
    train_here(MODEL, seldom_saved(training), dataset, reference)

    resumed_at = [record["step"] for record in records(folder, "started")]
    assert stopped.value.fields["step"] == resumed_at[1] < resumed_at[2]  # SIGTERM lost nothing
    assert_same_bits(folder, reference)
    receipt = json.loads((folder / "receipt.json").read_text())
    assert receipt["rows"] == 8 * 4000 - resumed_at[2] * 50
    assert receipt["rows_per_s"] > 0


def test_one_rank_stopped_again_and_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    dataset, training = (
        make_dataset(tmp_path / "dataset"),
        TrainingSpec(epochs=3, batch_rows=50, learning_rate=3e-3),
    )
    stops = 0
    while True:
        calls = iter(range(70))
        try:
            train_here(
                MODEL, training, dataset, tmp_path / "run", lambda left=calls: next(left, None) is None
            )
            break
        except Preempted:
            stops += 1
    train_here(MODEL, training, dataset, tmp_path / "reference")
    assert stops >= 2
    assert_same_bits(tmp_path / "run", tmp_path / "reference")


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
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        deadline = time.monotonic() + 10
        while is_alive(child):
            assert time.monotonic() < deadline, f"process {child} outlived its parent"
            time.sleep(0.01)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    dataset, training = make_dataset(tmp_path / "dataset"), TrainingSpec(epochs=1)
    folder = tmp_path / "run"
    launch._begin(launch._job(MODEL, training, dataset, (), folder), _made(folder))
    worker.train(launch._job(MODEL, training, dataset, (), folder), folder, ALONE, lambda: False)
    said: list[str] = []
    checkpoint = launch.train(MODEL, training, dataset, folder=folder, say=said.append)
    assert said == [f"already trained: {folder / 'result'}"]
    assert set(checkpoint.metrics) == {"valid_auc", "valid_logloss", "test_auc", "test_logloss"}


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
    found = json.loads((tmp_path / "run" / "result" / "metrics.json").read_text())["metrics"][metric]
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
    end = launch._End(status=status, exit_code=1, stop_asked=stop_asked, log=tmp_path / "log")
    with pytest.raises(error):
        launch._outcome(tmp_path, end)


def test_a_folder_with_another_training_is_refused_with_what_differs(tmp_path: Path) -> None:
    dataset, folder = make_dataset(tmp_path / "dataset"), _made(tmp_path / "run")
    launch._begin(launch._job(MODEL, TrainingSpec(), dataset, (), folder), folder)
    with pytest.raises(TrainingRefused, match="seed: 0 -> 1"):
        launch.train(MODEL, TrainingSpec(seed=1), dataset, folder=folder)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    folder = _made(tmp_path / "run")
    with (
        only_one(folder / "launch.lock", wait_s=0),
        pytest.raises(TrainingRefused, match="another process is training"),
    ):
        launch.train(MODEL, TrainingSpec(), make_dataset(tmp_path / "dataset"), folder=folder)


def test_more_processes_than_leased_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingRefused, match="one GPU each, but 1 leased: GPU-a"):
        launch.train(
            MODEL,
            TrainingSpec(processes=2),
            make_dataset(tmp_path / "dataset"),
            folder=tmp_path / "run",
            devices=("GPU-a",),
        )


@pytest.mark.parametrize(
    ("module", "unwanted"), [("serin.training.worker", "prefect"), ("serin.training.launch", "torch")]
)
def test_what_a_module_must_never_load(module: str, unwanted: str) -> None:
    code = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=WAIT_S).returncode == 0


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
