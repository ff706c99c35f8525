"""Trained weights on disk: weights.safetensors and model.json, which says what network they belong to (trained.py).

A reader gets both or an error, never one without the other. No pickle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from serin.errors import CheckpointBroken
from serin.formats.trained import WEIGHTS, ModelRecord, ShapeRecord, find_trained, write_trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    state: dict[str, Tensor]
    model: ModelRecord

    @property
    def shape(self) -> ShapeRecord:
        assert self.model.shape is not None  # of a network it is always known
        return self.model.shape


def write_weights(folder: Path, module_state: Mapping[str, Tensor], model_json: Mapping[str, Any]) -> None:
    """Both files into an existing folder. `model_json` holds model, shape and task; the digest is added here.

    Copies, since safetensors refuses tensors that share memory, as tied weights do.
    """
    copies = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in module_state.items()
    }
    write_trained(folder, partial(save_tensors, copies), model_json)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file, from the tensors' own memory. OSError when the disk does not take it."""
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else None, str(error)) from error


def read_weights(folder: Path | str) -> Weights:
    """The weights, mapped from their file, and their description, or CheckpointBroken when they do not belong
    together."""
    record, file = find_trained(folder)
    if record.file != WEIGHTS or record.shape is None:
        raise CheckpointBroken(path=Path(folder), reason=f"{record.file} holds no network's weights")
    try:
        return Weights(state=load_file(file), model=record)
    except SafetensorError as error:
        raise CheckpointBroken(path=Path(folder), reason=str(error)) from error
