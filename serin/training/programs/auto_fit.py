"""Trains one candidate of `model.kind: auto` on each fold, and collects its answers for the rows that it did not see.

With one process the training runs in this one: a fold of a small table takes less time than importing torch again.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from serin.errors import TrainingRefused
from serin.formats.dataset import read_dataset
from serin.formats.shards import Array, read_split
from serin.machine import environment
from serin.models.margins import open_margins
from serin.store.artifacts import Dataset
from serin.training.launch import launcher
from serin.training.launch.job import TrainingJob, result_folder
from serin.training.launch.machines import Machines
from serin.training.parallel.ranks import Ranks
from serin.training.programs import trees, worker
from serin.training.programs.auto_portfolio import Candidate

HELD_OUT = "valid"  # the folder of a training that the valid rows of the dataset judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A candidate with its result folder for each fold. `margins`: its answers for the valid rows of all folds, one
    after the other. `amount`: boosting rounds or epochs until it was best, the mean over folds. `seconds`: what all
    folds took."""

    candidate: Candidate
    results: tuple[Path, ...]
    margins: Array
    amount: int
    seconds: float


def fit_candidate(
    job: TrainingJob,
    candidate: Candidate,
    folds: Sequence[Path],
    place: Path,
    stop: threading.Event,
    *,
    most_s: float = math.inf,
) -> Fitted:
    """Trains in `place/0`, `place/1`, ... for each of the folds, or in `place/valid` where it is the dataset itself.
    What an earlier attempt finished is kept. `most_s`: no tree is begun later in a training. Raises the errors of a
    training, and Preempted."""
    results, found, amounts, began = [], [], [], time.monotonic()
    for fold in folds:
        name = HELD_OUT if fold == Path(job.dataset) else fold.name
        result = fit_one(job, candidate, fold, place / name, stop, most_s=most_s)
        rows = read_split(fold, "valid").whole()
        results.append(result)
        found.append(open_margins(result)(np.asarray(rows.num), np.asarray(rows.cat)))
        amounts.append(_amount(candidate, result))
    mean = max(1, round(sum(amounts) / len(amounts)))
    return Fitted(
        candidate=candidate,
        results=tuple(results),
        margins=np.concatenate(found),
        amount=mean,
        seconds=time.monotonic() - began,
    )


def fit_one(
    job: TrainingJob,
    candidate: Candidate,
    dataset: Path,
    folder: Path,
    stop: threading.Event,
    *,
    most_s: float = math.inf,
) -> Path:
    """Trains on one dataset without scoring test rows; returns the result folder."""
    result = result_folder(folder)
    if result.is_dir():
        return result
    if job.processes > 1:
        devices = tuple((environment.visible_devices() or "").split(",")) if job.gpu else ()
        rows = read_dataset(dataset).rows
        whole = Dataset(path=str(dataset), digest=job.dataset_digest, rows=rows)
        launcher.train(
            candidate.model,
            candidate.training,
            whole,
            folder=folder,
            devices=devices,
            stop=stop,
            test=False,
            machines=Machines(),
        )
        return result
    folder.mkdir(parents=True, exist_ok=True)
    own = TrainingJob(
        model=candidate.model,
        training=candidate.training,
        dataset=str(dataset),
        dataset_digest=job.dataset_digest,
        processes=1,
        gpu=job.gpu,
        test=False,
    )
    if candidate.is_trees:
        status = trees.train(own, folder, stop.is_set, until=time.monotonic() + most_s)
    else:
        device = torch.device("cuda", 0) if job.gpu else torch.device("cpu")
        status = worker.train(own, folder, Ranks(rank=0, size=1, device=device), stop.is_set)
    if status.state != "done":
        raise TrainingRefused(folder=folder, reason=status.reason)
    return result


def _amount(candidate: Candidate, result: Path) -> int:
    """Returns the boosting rounds or the epochs after which the model was best."""
    state = json.loads((result / "state.json").read_text(encoding="utf-8"))
    if candidate.is_trees:
        return int(state["step"])
    return -(-int(state["step"]) // int(state["choices"]["steps_per_epoch"]))
