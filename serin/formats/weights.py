"""Trained weights on disk: weights.safetensors and model.json, which says what network they belong to.

model.json carries the digest of the weights; a reader gets both or an error, never one without the other. No pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from serin.errors import CheckpointBroken
from serin.spec.stages import ModelSpec

WEIGHTS = "weights.safetensors"
MODEL = "model.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ShapeRecord(_Record):
    numeric: int
    sizes: tuple[int, ...]
    outputs: int


class ModelRecord(_Record):
    """model.json."""

    format: Literal["serin.weights"] = "serin.weights"
    version: Literal[1] = 1
    model: ModelSpec
    shape: ShapeRecord
    task: Literal["binary", "multiclass", "regression"]
    weights_sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    state: dict[str, Tensor]
    model: ModelRecord


def write_weights(folder: Path, module_state: Mapping[str, Tensor], model_json: Mapping[str, Any]) -> None:
    """Both files into an existing folder. `model_json` holds model, shape and task; the digest is added here."""
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in module_state.items()})
    record = ModelRecord.model_validate({**model_json, "weights_sha256": hashlib.sha256(data).hexdigest()})
    (folder / WEIGHTS).write_bytes(data)
    (folder / MODEL).write_text(record.model_dump_json(indent=1) + "\n")


def read_weights(folder: Path | str) -> Weights:
    """The weights and their description, or CheckpointBroken when they do not belong together."""
    place = Path(folder)
    try:
        record = ModelRecord.model_validate(json.loads((place / MODEL).read_text()))
        data = (place / WEIGHTS).read_bytes()
    except (OSError, ValidationError, json.JSONDecodeError) as error:
        raise CheckpointBroken(path=place, reason=str(error)) from error
    if hashlib.sha256(data).hexdigest() != record.weights_sha256:
        raise CheckpointBroken(path=place, reason=f"{WEIGHTS} does not match the digest in {MODEL}")
    try:
        return Weights(state=load(data), model=record)
    except SafetensorError as error:
        raise CheckpointBroken(path=place, reason=str(error)) from error
