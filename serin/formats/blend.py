"""blend.json of a training's result: trained models in subfolders, and the weight of each one's margin.

The answer is the weighted sum of the members' logits (of their values in a regression). No torch here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serin.errors import CheckpointBroken
from serin.formats.trained import BLEND, RECORD, read_trained, write_trained


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


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
        record, data = read_trained(source)
        place = folder / "members" / str(number)
        place.mkdir(parents=True)
        (place / record.file).write_bytes(data)
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
