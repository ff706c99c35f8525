"""Writes the result of a network's training: the best epoch's weights, measured on the test rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from serin.formats.schema import Task
from serin.formats.weights import write_weights
from serin.models.shape import TableShape
from serin.training.launch.job import ResolvedSettings, TrainingJob
from serin.training.results.checkpoint import Position
from serin.training.results.publish import publish_result


def write_result(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    job: TrainingJob,
    choices: ResolvedSettings,
    shape: TableShape,
    task: Task,
    position: Position,
    metrics: dict[str, float],
) -> None:
    """Writes `result/{weights.safetensors, model.json, metrics.json, state.json}`, completely or not at all."""
    columns = {"numeric": shape.numeric, "sizes": shape.sizes, "outputs": shape.outputs}
    record = {"model": job.model.model_dump(), "shape": columns, "task": task}
    publish_result(
        folder,
        fill=lambda scratch: write_weights(scratch, weights, record),
        job=job,
        step=position.best_step or 0,
        steps=position.step,
        choices=choices.model_dump(),
        metrics=metrics,
        epochs=[epoch.model_dump() for epoch in position.epochs],
    )
