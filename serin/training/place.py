"""Where a training lies and what it may take: for the command as for the flows, so that each finds the other's.

The folder is named by what is trained. A second try, after whatever ended the first one, takes the training up at its
last checkpoint, and a third finds it done.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from serin.artifacts import Dataset
from serin.hardware import inventory
from serin.runs import run_folder
from serin.spec.stages import ModelSpec, TrainingSpec
from serin.stage_keys import StageKey, key_of

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
        dataset=dataset.digest,
        own_files=_own_files(model),
    )


def _own_files(model: ModelSpec) -> str:
    """The digest of the files of the user's own that the model section names: a changed script is another training."""
    module = (model.module or "").rpartition(":")[0]
    files = (model.script, model.onnx, model.golden, module if module.endswith(".py") else None)
    digest = hashlib.sha256()
    for file in files:
        if file is not None and Path(file).is_file():
            digest.update(hashlib.sha256(Path(file).read_bytes()).digest())
    return digest.hexdigest()


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
