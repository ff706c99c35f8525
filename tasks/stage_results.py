"""What a stage gave for what it was given: one small JSON file each, so that a pipeline run again does nothing twice.

<home>/stages/<stage>/<key>.json; the key is a digest of everything the stage may depend on. Prefect's own cache is not
used: its entries know nothing of a checkpoint that was removed, and it would take a GPU's slot to find out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from serin.spec.section import Section

Result = TypeVar("Result")


def stage_key(*parts: Section | tuple[Section, ...] | str | int) -> str:
    """A digest of `parts`, the same in every process."""
    values = [_plain(part) for part in parts]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def find_result(home: Path, stage: str, key: str, kind: type[Result]) -> Result | None:
    """The result kept for `key`; None also for a file that is damaged or of another form: the stage is run again."""
    try:
        return TypeAdapter(kind).validate_json(_file(home, stage, key).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def keep_result(home: Path, stage: str, key: str, result: Any) -> None:
    """Whole or not at all."""
    path = _file(home, stage, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with scratch.open("x") as file:
        json.dump(dataclasses.asdict(result), file)
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path)


def _file(home: Path, stage: str, key: str) -> Path:
    return home / "stages" / stage / f"{key}.json"


def _plain(part: Section | tuple[Section, ...] | str | int) -> Any:
    if isinstance(part, tuple):
        return [_plain(section) for section in part]
    return part.model_dump(mode="json", by_alias=True) if isinstance(part, Section) else part
