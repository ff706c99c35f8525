"""model.json of a training's result: which model it is, of what form, and the digest of the file that holds it.

The file beside it is weights.safetensors (a network), trees.ubj (XGBoost), model.onnx (a script's, or one trained
elsewhere) or blend.json: several of the first two in subfolders, and the weight of each one's margin. The answer of a
blend is the weighted sum of its members' logits (of their values in a regression). No torch here.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serin.errors import CheckpointBroken
from serin.spec.model import ModelSpec

RECORD = "model.json"
WEIGHTS: Final = "weights.safetensors"
TREES: Final = "trees.ubj"
GRAPH: Final = "model.onnx"
BLEND: Final = "blend.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ShapeRecord(_Record):
    numeric: int
    sizes: tuple[int, ...]
    outputs: int


class ModelRecord(_Record):
    """model.json. `shape` and `task` are None for a model with custom inputs, which its schema.json describes."""

    format: Literal["serin.weights"] = "serin.weights"
    version: Literal[2] = 2
    model: ModelSpec
    shape: ShapeRecord | None = None
    task: Literal["binary", "multiclass", "regression"] | None = None
    file: Literal["weights.safetensors", "trees.ubj", "model.onnx", "blend.json"] = WEIGHTS
    weights_sha256: str = ""  # of the file


def write_trained(folder: Path, data: bytes | Callable[[Path], None], model_json: Mapping[str, Any]) -> None:
    """The file and model.json into an existing folder. `data`: the file's content, or what writes it. `model_json`
    holds the other fields; the digest is added."""
    record = ModelRecord.model_validate({**model_json})
    file = folder / record.file
    if isinstance(data, bytes):
        file.write_bytes(data)
    else:
        data(file)
    record = record.model_copy(update={"weights_sha256": file_sha256(file)})
    (folder / RECORD).write_text(record.model_dump_json(indent=1) + "\n")


def read_record(folder: Path | str) -> ModelRecord:
    """What model.json says. Says nothing about the file beside it: `read_trained` does."""
    place = Path(folder)
    try:
        return ModelRecord.model_validate_json((place / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointBroken(path=place, reason=str(error)) from error


def find_trained(folder: Path | str) -> tuple[ModelRecord, Path]:
    """The record and the file it speaks of, or CheckpointBroken when they do not belong together. In a bundle the file
    may be beside the graph, one folder up: the graph refers to it."""
    place, record = Path(folder), read_record(folder)
    file = place / record.file
    if not file.exists() and (place.parent / record.file).exists():
        file = place.parent / record.file
    try:
        digest = file_sha256(file)
    except OSError as error:
        raise CheckpointBroken(path=place, reason=str(error)) from error
    _check_digest(place, record, digest)
    return record, file


def read_trained(folder: Path | str) -> tuple[ModelRecord, bytes]:
    """The record and the content of its file. For weights, which may be large, use `read_weights`."""
    record, file = find_trained(folder)
    data = file.read_bytes()
    _check_digest(Path(folder), record, hashlib.sha256(data).hexdigest())
    return record, data


def _check_digest(place: Path, record: ModelRecord, digest: str) -> None:
    if digest != record.weights_sha256:
        raise CheckpointBroken(path=place, reason=f"{record.file} does not match the digest in {RECORD}")


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class BlendMember(_Record):
    """`folder`: relative to the blend's. `record_sha256`: of the member's model.json, which has the model's digest."""

    folder: str = Field(pattern=r"^members/[0-9]+$")
    weight: float = Field(gt=0)
    record_sha256: str


class Blend(_Record):
    format: Literal["serin.blend"] = "serin.blend"
    version: Literal[1] = 1
    members: tuple[BlendMember, ...] = Field(min_length=2)


def write_blend(folder: Path, members: Sequence[tuple[Path, float]], model_json: dict[str, Any]) -> None:
    """Copies the members, result folders with their weights, and writes blend.json and model.json beside them."""
    described = []
    for number, (source, weight) in enumerate(members):
        record, file = find_trained(source)
        place = folder / "members" / str(number)
        place.mkdir(parents=True)
        shutil.copyfile(file, place / record.file)
        text = (source / RECORD).read_bytes()
        (place / RECORD).write_bytes(text)
        described.append(
            BlendMember(
                folder=f"members/{number}", weight=weight, record_sha256=hashlib.sha256(text).hexdigest()
            )
        )
    document = Blend(members=tuple(described)).model_dump_json(indent=1) + "\n"
    write_trained(folder, document.encode(), {**model_json, "file": BLEND})


def read_blend(folder: Path) -> list[tuple[Path, float]]:
    """Returns the members' folders with their weights; CheckpointBroken when one is not the one that was blended."""
    _, data = read_trained(folder)
    try:
        blend = Blend.model_validate_json(data)
        for member in blend.members:
            text = (folder / member.folder / RECORD).read_bytes()
            if hashlib.sha256(text).hexdigest() != member.record_sha256:
                raise CheckpointBroken(path=folder / member.folder, reason=f"it is not the model of {BLEND}")
    except (OSError, ValidationError) as error:
        raise CheckpointBroken(path=folder, reason=str(error)) from error
    return [(folder / member.folder, member.weight) for member in blend.members]
