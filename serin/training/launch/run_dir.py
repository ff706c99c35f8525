"""Locates the folder of a training and the devices it may use, so that the command and the flows find the same one.

The folder is named by what is trained. A second attempt, after any interruption, resumes at the last checkpoint, and a
third finds the result.
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
from serin.store.stage_keys import StageKey, environment_part, key_of
from serin.training.launch.job import gpus_for


def training_key(model: ModelSpec, training: TrainingSpec, dataset: Dataset) -> str:
    """Returns the name of a training: the digest of `training_parts`."""
    return training_parts(model, training, dataset).digest


def training_parts(model: ModelSpec, training: TrainingSpec, dataset: Dataset) -> StageKey:
    """Returns what determines the weights; the number of processes does not."""
    decides = training.model_copy(
        update={
            "processes": "auto",
            "processes_per_gpu": 1,
            "strategy": "auto",
            "gradient_checkpointing": False,
            "checkpoint_every_steps": "auto",
        }
    )
    return key_of(
        "train",
        model=model.without_folders(),
        training=decides,
        dataset=f"{dataset.digest} {dataset.edition}",
        own_code=own_code(model),
        **environment_part(runs_own_code=model.module is not None or model.script is not None),
    )


def own_code(model: ModelSpec) -> str:
    """Returns the digest of the user's code for the model: code with all its imports, and files."""
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
    """Raises CodeChanged when the user's code has changed while the training waited for its GPUs."""
    if asked != now:
        raise CodeChanged(folder=folder)


def training_folder(
    home: Path, model: ModelSpec, training: TrainingSpec, dataset: Dataset, *, attempt: str | None = None
) -> Path:
    """Returns the same folder for the same training; `attempt` separates one that must not resume an older one."""
    apart = f"-{attempt[:8]}" if attempt else ""
    return run_folder(home, f"train-{training_key(model, training, dataset)}{apart}")


def devices_wanted(model: ModelSpec, training: TrainingSpec) -> int:
    """Returns how many GPUs to lease: one per process, or fewer where several share one; all that are here for `auto`,
    none where there are none."""
    present = len(inventory())
    if not present or model.kind == "onnx":
        return 0
    if model.kind == "xgboost" and training.processes == "auto":
        return 1  # histograms of several GPUs are added up in each round: only for tables that one GPU cannot hold
    return present if training.processes == "auto" else gpus_for(training.processes, training)
