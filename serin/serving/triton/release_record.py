"""The stored facts about a release, which outlive the process that started it: <releases>/<release>/release.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.machine.documents import read_json
from serin.machine.durable import write_secret
from serin.machine.typed_json import Document
from serin.serving.triton.process import TritonPorts

FILE = "release.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How a release is served. `devices`: the GPUs on each of which it has reserved `bytes`; none: the CPU.

    `arena_bytes`: the part that ONNX Runtime may use per instance. `request_s`: how long a request may take.
    """

    backend: str
    reason: str = ""
    devices: tuple[str, ...] = ()
    bytes: int = 0
    arena_bytes: int = 0
    request_s: float = 5.0

    def __str__(self) -> str:
        where = f"{', '.join(self.devices)} with {self.bytes >> 20:,} MB" if self.devices else "the CPU"
        return f"{self.backend} on {where}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Document, form="serin.release", version=2):
    release: str
    place: TritonPorts
    served: Served


def read_record(folder: Path) -> Record | None:
    """Reads the record of a release; None for one that was never started here. Raises FileBroken for one that is
    damaged or of another release."""

    def record(found: Any) -> Record:
        made = Record.from_json(found)
        if made.release != folder.name:
            raise ValueError(f"it is the record of {made.release}")
        return made

    advice = f"move it away: {folder.name} is then started again with another record"
    return read_json(folder / FILE, record, advice=advice)


def write_record(folder: Path, record: Record) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_secret(folder / FILE, record.dump().decode())


def reserved_bytes(releases: Path) -> dict[str, dict[str, int]]:
    """Returns device -> release -> bytes, of every release with a record."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(releases.glob(f"*/{FILE}")):
        try:
            served = json.loads(path.read_text(encoding="utf-8")).get("served") or {}
            for device in served.get("devices", ()):
                found.setdefault(device, {})[path.parent.name] = int(served["bytes"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # it is being removed
    return found
