"""Trainings for tests: in this process, killed and told to stop, and what they left."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from serin.formats.weights import read_weights
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.launch.job import Status, TrainingJob
from serin.training.launch.progress import Follower
from serin.training.parallel.ranks import Ranks
from serin.training.programs import worker

MODEL = ModelSpec(hidden=(64, 32), dropout=0.1)
ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))
WAIT_S = 500.0


def seldom_saved(training: TrainingSpec) -> TrainingSpec:
    return TrainingSpec(**{**training.model_dump(), "checkpoint_every_steps": "auto"})


def job_of(model: ModelSpec, training: TrainingSpec, dataset: Dataset, **changes: Any) -> TrainingJob:
    """As the launcher makes it, on the CPU."""
    processes = 1 if training.processes == "auto" else training.processes
    given = {"dataset": dataset.path, "dataset_digest": dataset.digest, "processes": processes, "gpu": False}
    return TrainingJob(model=model, training=training, **{**given, **changes})


def train_here(
    model: ModelSpec,
    training: TrainingSpec,
    dataset: Dataset,
    folder: Path,
    stop_asked: Callable[[], bool] = lambda: False,
) -> Status:
    """The same training in this process, without torchrun."""
    folder.mkdir(exist_ok=True)
    return worker.train(job_of(model, training, dataset), folder, ALONE, stop_asked)


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


def ask_this_process_to_stop(_pid: int) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "progress.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def choices(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "choices.json").read_text())
    return found


def result(folder: Path) -> dict[str, Any]:
    """metrics.json of a training: `metrics` and `epochs`."""
    found: dict[str, Any] = json.loads((folder / "result" / "metrics.json").read_text())
    return found


def assert_same_bits(one: Path, other: Path) -> None:
    ours, theirs = (read_weights(folder / "result").state for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (one / "result" / "metrics.json").read_text() == (other / "result" / "metrics.json").read_text()


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder
