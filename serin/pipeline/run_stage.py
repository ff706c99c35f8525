"""Each stage from the spec alone, without an orchestrator. The stage before it is found, or done first."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from serin.errors import NotTrained
from serin.formats.trained import read_record
from serin.machine import environment
from serin.pipeline.etl import build_dataset
from serin.pipeline.export import export_model
from serin.pipeline.stage import StageResult
from serin.pipeline.train import find_checkpoint, train_model
from serin.spec.model import ModelSpec
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Checkpoint, Dataset

if TYPE_CHECKING:
    from serin.training.launch.machines import Machines


def run_etl(spec: PipelineSpec, *, fresh: bool = False) -> StageResult[Dataset]:
    """The spec's dataset."""
    return build_dataset(
        spec.data, spec.features, spec.etl, name=spec.name, priority=spec.priority, fresh=fresh
    )


def run_train(
    spec: PipelineSpec, *, machines: Machines | None = None, fresh: bool = False
) -> StageResult[Checkpoint]:
    """The spec's weights. Their dataset is built first where it is not there."""
    dataset = run_etl(spec).value
    return train_model(
        spec.model,
        spec.training,
        dataset,
        name=spec.name,
        machines=machines,
        priority=spec.priority,
        fresh=fresh,
    )


def run_export(
    spec: PipelineSpec, *, fresh: bool = False, approved_by: str | None = None
) -> StageResult[Bundle]:
    """A version from the weights that `run_train` left; NotTrained when there are none.

    `approved_by`: the person who approves it although it is worse than the live version."""
    dataset = run_etl(spec).value
    checkpoint = find_checkpoint(spec.model, spec.training, dataset)
    if checkpoint is None:
        raise NotTrained(spec=spec.name)
    with _beside_own_code(spec.model, checkpoint):
        return export_model(spec, checkpoint, dataset, fresh=fresh, approved_by=approved_by)


def _beside_own_code(model: ModelSpec, checkpoint: Checkpoint) -> AbstractContextManager[None]:
    """Weights of a run that was sent name their module relative to its package: here it is relative to the spec."""
    place = (read_record(checkpoint.path).model.module or "").rpartition(":")[0]
    if place.endswith(".py") and not Path(place).exists():
        own = Path(model.script or (model.module or "").rpartition(":")[0])
        for folder in own.parents:
            if (folder / place).is_file():
                return environment.working_in(folder)
    return nullcontext()
