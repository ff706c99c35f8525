"""Where a training lies and what it may take: for the command as for the flows, so that each finds the other's.

The folder is named by what is trained. A second try, after whatever ended the first one, takes the training up at its
last checkpoint, and a third finds it done.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from serin.errors import CodeChanged
from serin.machine.hardware import inventory
from serin.spec.code_digest import digest_of_file, digest_of_module
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.store.runs import run_folder
from serin.store.stage_keys import StageKey, key_of

_FORMAT = 1  # raise it when the same inputs must give another result


def training_key(model: ModelSpec, training: TrainingSpec, dataset: Dataset) -> str:
    """Names a training: the digest of `training_parts`."""
    return training_parts(model, training, dataset).digest


def training_parts(model: ModelSpec, training: TrainingSpec, dataset: Dataset) -> StageKey:
    """What decides the weights; over how many processes they are computed does not."""
    decides = training.model_copy(
        update={
            "processes": "auto",
            "strategy": "auto",
            "gradient_checkpointing": False,
            "checkpoint_every_steps": "auto",
        }
    )
    return key_of(
        "train",
        form=_FORMAT,
        model=model,
        training=decides,
        dataset=edition_of(dataset),
        own_code=own_code(model),
    )


def edition_of(dataset: Dataset) -> str:
    """Its digest, which leaves out what may differ in its last bit, and the name it was published under, which says by
    what it was made."""
    return f"{dataset.digest} {Path(dataset.path).name}"


def own_code(model: ModelSpec) -> str:
    """The digest of what the user brings for the model: code with all that it imports, and files."""
    parts = []
    place = (model.module or "").rpartition(":")[0]
    if place:
        parts.append(digest_of_file(Path(place)) if place.endswith(".py") else digest_of_module(place))
    if model.script is not None:
        parts.append(digest_of_file(Path(model.script)))
    for file in (model.onnx, model.golden):
        if file is not None and Path(file).is_file():
            with Path(file).open("rb") as stream:
                parts.append(hashlib.file_digest(stream, "sha256").hexdigest())
    return " ".join(parts)


def refuse_changed_code(asked: StageKey, now: StageKey, folder: Path) -> None:
    """CodeChanged when what a training is named by has changed while it waited for its GPUs."""
    if asked != now:
        raise CodeChanged(folder=folder)


def training_folder(
    home: Path, model: ModelSpec, training: TrainingSpec, dataset: Dataset, *, attempt: str | None = None
) -> Path:
    """The same for the same training; `attempt` sets one apart that must not take up an older one."""
    apart = f"-{attempt[:8]}" if attempt else ""
    return run_folder(home, f"train-{training_key(model, training, dataset)}{apart}", create=True)


def devices_wanted(model: ModelSpec, training: TrainingSpec) -> int:
    """How many GPUs to lease: one for each process, all that are here for `auto`, none where there are none."""
    present = len(inventory())
    if not present or model.kind == "onnx":
        return 0
    if model.kind == "xgboost":
        return 1
    return present if training.processes == "auto" else training.processes
