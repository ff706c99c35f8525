"""The end of a training: the best epoch's weights, measured on the test rows, published in one rename."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from serin.formats.schema import Task
from serin.formats.weights import write_weights
from serin.models.shape import TableShape
from serin.training.checkpoint import Position
from serin.training.files import sync_folder
from serin.training.job import Choices, TrainingJob, result_folder


def write_result(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    job: TrainingJob,
    choices: Choices,
    shape: TableShape,
    task: Task,
    position: Position,
    metrics: dict[str, float],
) -> None:
    """`result/{weights.safetensors, model.json, metrics.json, state.json}`, whole or not at all."""
    scratch, final = folder / ".result", result_folder(folder)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    columns = {"numeric": shape.numeric, "sizes": shape.sizes, "outputs": shape.outputs}
    write_weights(scratch, weights, {"model": job.model.model_dump(), "shape": columns, "task": task})
    epochs = [record.model_dump() for record in position.epochs]
    _write(scratch / "metrics.json", "serin.metrics", metrics=metrics, epochs=epochs)
    _write(
        scratch / "state.json",
        "serin.training.result",
        step=position.best_step,
        steps=position.step,
        dataset=job.dataset_digest,
        training=job.training.model_dump(mode="json"),
        choices=choices.model_dump(),
    )
    scratch.rename(final)
    sync_folder(folder)


def _write(path: Path, form: str, **content: object) -> None:
    path.write_text(json.dumps({"format": form, "version": 1, **content}, indent=1) + "\n")
