"""What is known of a release beyond the life of whoever started it: `<releases>/<release>/release.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serin.machine.durable import write_secret
from serin.serving.triton.process import TritonPorts
from serin.store.artifacts import Release

FORMAT, VERSION = "serin.release", 1
FILE = "release.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """How it is served. `devices`: the GPUs on each of which it has reserved `bytes`; none: the CPU. `arena_bytes`: of
    these, what ONNX Runtime may take for one instance. `request_s`: how long a request may take."""

    shape: str
    reason: str = ""
    devices: tuple[str, ...] = ()
    bytes: int = 0
    arena_bytes: int = 0
    request_s: float = 5.0

    def __str__(self) -> str:
        where = f"{', '.join(self.devices)} with {self.bytes >> 20:,} MB" if self.devices else "the CPU"
        return f"{self.shape} on {where}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    place: TritonPorts
    served: Served


def read_record(folder: Path) -> Record | None:
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    served = found.get("served") or {"shape": "onnx_python"}  # what there was before there was a choice
    devices = tuple(served.get("devices", ()))
    return Record(
        place=TritonPorts.from_json(found["place"]), served=Served(**{**served, "devices": devices})
    )


def write_record(folder: Path, release: Release, record: Record) -> None:
    document = {
        "format": FORMAT,
        "version": VERSION,
        "release": release.name,
        "place": record.place.to_json(),
        "served": asdict(record.served),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_secret(folder / FILE, json.dumps(document))
