"""What a stage depends on, by name: so that what was done is found again, and it can be said why something is done.

The sections of the spec, what stages before it gave, the sources of Serin that it uses, and the versions of the
libraries that decide its result. Where and over how many processes it runs decides nothing and stands nowhere here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.durable import write_whole
from serin.spec.section import Section

_SOURCES: Mapping[str, tuple[str, ...]] = {
    "etl": ("etl", "features", "formats", "expressions.py"),
    "train": ("training", "models", "formats"),
    "export": ("export", "etl", "features", "models", "formats", "expressions.py"),
}
_LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "etl": ("numpy", "pyarrow"),
    "train": ("torch", "numpy", "xgboost"),
    "export": ("torch", "numpy", "onnx", "onnxscript", "onnxruntime", "xgboost"),
}
_WORDS = {"sources": "Serin's code for it", "versions": "versions of libraries"}

Part = Section | tuple[Section, ...] | str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKey:
    stage: str
    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        return _digest(dict(self.parts))


def key_of(stage: str, **parts: Part) -> StageKey:
    """The key of a stage for these parts, the sources it uses and the versions that matter."""
    named = {name: _digest(_plain(part)) for name, part in parts.items()}
    return StageKey(
        stage=stage, parts={**named, "sources": sources_digest(stage), "versions": _versions(stage)}
    )


@functools.cache
def sources_digest(stage: str) -> str:
    """Of the files that do the stage's work, as they lie on disk: a process that began uses those it began with."""
    package = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for name in _SOURCES[stage]:
        place = package / name
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(str(path.relative_to(package)).encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def remember(home: Path, name: str, key: StageKey) -> None:
    """That the stage was done for the pipeline `name`, so that `why` can compare."""
    path = _last(home, name, key.stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dict(key.parts)))


def why(home: Path, name: str, key: StageKey, *, fresh: bool = False) -> str:
    """Why the stage has to be done, in words."""
    if fresh:
        return "asked for by --fresh"
    try:
        last: dict[str, str] = json.loads(_last(home, name, key.stage).read_text())
    except (OSError, ValueError):
        return "never done before"
    changed = [
        _describe(part, last.get(part), now) for part, now in key.parts.items() if last.get(part) != now
    ]
    return f"changed since the last time: {', '.join(changed)}" if changed else "its result is gone"


def note(home: Path, run: str, stage: str, *, ran: bool, why: str) -> None:
    """For `serin runs show`: what became of a stage in a run."""
    path = _notes(home, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"stage": stage, "ran": ran, "why": why}) + "\n")


def notes(home: Path, run: str) -> list[dict[str, Any]]:
    """What became of each stage in a run, the last word on each, in the order of the first."""
    try:
        lines = _notes(home, run).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            found[entry["stage"]] = entry
        except (ValueError, KeyError, TypeError):
            continue  # cut short by a crash
    return list(found.values())


def _describe(part: str, before: str | None, now: str) -> str:
    words = _WORDS.get(part, part)
    if part != "versions" or before is None:
        return words
    old, new = set(before.split()), set(now.split())
    return f"{words} ({', '.join(sorted(old - new))} -> {', '.join(sorted(new - old))})"


def _versions(stage: str) -> str:
    found = []
    for library in _LIBRARIES[stage]:
        try:
            found.append(f"{library}={importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return " ".join(found)


def _plain(part: Part) -> Any:
    if isinstance(part, tuple):
        return [_plain(section) for section in part]
    return part.model_dump(mode="json", by_alias=True) if isinstance(part, Section) else part


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _last(home: Path, name: str, stage: str) -> Path:
    return home / "stages" / stage / f"last-{name}.parts"


def _notes(home: Path, run: str) -> Path:
    return home / "stages" / "runs" / f"{run}.jsonl"
