"""Trains XGBoost on the same shards, with its own checkpoints. Does not import torch.

`python -m serin.training.programs.trees FOLDER PARENT_PID`, started by the launcher. How it ended is in status.json.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from serin.formats.dataset import DatasetDescription, read_dataset
from serin.formats.shards import read_split
from serin.formats.trained import TREES, write_trained
from serin.models.shape import record_of
from serin.models.trees import in_units, load_xgboost, read_booster, scores
from serin.training.data.tree_matrix import margins_on, sizes_of, target_unit
from serin.training.launch.job import Status, TrainingJob
from serin.training.programs.attempt import run_attempt
from serin.training.programs.grow_trees import grow_trees, tree_settings
from serin.training.results.judge import judge_scores
from serin.training.results.publish import publish_result
from serin.training.results.tree_checkpoints import Grown


def main() -> None:
    run_attempt(lambda job, folder, stop: train(job, folder, stop.is_set))


def train(
    job: TrainingJob, folder: Path, stop_asked: Callable[[], bool], *, until: float = math.inf
) -> Status:
    """Runs one attempt to the end. `until`: no round begins after this time (of time.monotonic). Raises Preempted."""
    xgboost = load_xgboost()
    data, began = read_dataset(job.dataset), time.monotonic()
    try:
        if job.processes > 1:
            from serin.training.programs.tree_workers import grow_on_workers  # imports Dask

            grown, first = grow_on_workers(folder, job.processes, stop_asked)
        else:
            grown, first = grow_trees(job, folder, stop_asked, until=until)
        finish(job, data, folder, grown)
    except xgboost.core.XGBoostError as error:
        reason = f"XGBoost: {_first_line(str(error))}"
        return Status(state="refused", reason=reason)
    rows = (grown.rounds - first) * data.rows["train"]
    return Status(state="done", step=grown.rounds, rows=rows, work_s=time.monotonic() - began)


def finish(job: TrainingJob, data: DatasetDescription, folder: Path, grown: Grown) -> None:
    """Measures the trees up to the best round like every other model, and publishes them."""
    booster, settings = read_booster(grown.trees)[: grown.best_round], tree_settings(job, data)
    booster = in_units(booster, float(target_unit(job, data)))
    metrics: dict[str, float] = {}
    trees = bytes(booster.save_raw("ubj"))
    for split in ("valid", "test") if job.test else ("valid",):
        if data.rows.get(split):
            found = _judge(booster, job, data, split, settings["device"])
            metrics |= {f"{split}_{name}": value for name, value in found.items()}
    record = record_of(job.model, data, TREES)
    publish_result(
        folder,
        fill=lambda scratch: write_trained(scratch, trees, record),
        job=job,
        step=grown.best_round,
        steps=grown.rounds,
        choices={**settings, "xgboost": load_xgboost().__version__},
        metrics=metrics,
    )


def _judge(
    booster: Any, job: TrainingJob, data: DatasetDescription, split: str, device: str
) -> dict[str, float]:
    arrays, sizes = read_split(job.dataset, split), sizes_of(data)
    margin = [
        margins_on(device, booster, num, cat, sizes) for num, cat in zip(arrays.num, arrays.cat, strict=True)
    ]
    found = scores(np.concatenate(margin), data.task)
    target = np.concatenate(arrays.target)
    return judge_scores(target, found, data.task, data.targets, errors=True)


def _first_line(text: str) -> str:
    """Returns the message of an XGBoost error, which begins with a time and ends with a stack."""
    lines = [line for line in text.splitlines() if line.strip() and "Stack trace" not in line]
    return lines[0].partition("] ")[2] or lines[0] if lines else "an error without a message"


if __name__ == "__main__":
    main()
