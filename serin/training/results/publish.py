"""Publishes the result folder of a training, completely or not at all. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serin.training.launch.job import TrainingJob, result_folder, whole_folder
from serin.training.results.judge import ERROR


def publish_result(
    folder: Path,
    *,
    fill: Callable[[Path], None],
    job: TrainingJob,
    step: int,
    steps: int,
    choices: dict[str, Any],
    metrics: dict[str, float],
    epochs: Sequence[dict[str, Any]] = (),
) -> None:
    """Publishes `result/{model.json, metrics.json, state.json}` and the model itself, which `fill` writes into a
    folder.

    `step`: where the model was best, `steps`: how many were done. `metrics`: with standard errors as `judge_scores`
    names them.
    """
    errors = {name.removesuffix(ERROR): value for name, value in metrics.items() if name.endswith(ERROR)}
    metrics = {name: value for name, value in metrics.items() if not name.endswith(ERROR)}
    with whole_folder(result_folder(folder)) as scratch:
        fill(scratch)
        _write(scratch / "metrics.json", "serin.metrics", metrics=metrics, errors=errors, epochs=list(epochs))
        _write(
            scratch / "state.json",
            "serin.training.programs.worker",
            step=step,
            steps=steps,
            dataset=job.dataset_digest,
            training=job.training.model_dump(mode="json"),
            choices=choices,
        )


def _write(path: Path, form: str, **content: object) -> None:
    text = json.dumps({"format": form, "version": 1, **content}, indent=1, allow_nan=False)
    path.write_text(text + "\n")
