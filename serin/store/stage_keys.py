"""The dependencies of a stage, by name: they identify its result, and explain why a stage runs.

They are the sections of the spec, the results of earlier stages, the user's code and its environment, Serin's code
that computes its result, and the versions of Python and of the libraries that decide it. Where and over how many
processes it runs has no effect and is not in a key; nor have messages, reports and how results are stored.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serin.machine import environment
from serin.machine.durable import write_whole
from serin.machine.packages import entered
from serin.spec.code_digest import digest_of_own
from serin.spec.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`version`: raised when the same inputs and the same code must give another result. `computed_by`: where Serin's
    code that computes the result begins; all that it uses belongs to it (spec/parsed_code.py). `libraries`: those that
    decide the result."""

    version: int
    computed_by: tuple[str, ...]
    libraries: tuple[str, ...]


STAGES: Mapping[str, Stage] = {
    "etl": Stage(
        version=5,
        computed_by=("serin.etl.compute:compute", "serin.features.ops"),
        libraries=("numpy", "pandas", "pyarrow", "cupy", "cudf"),
    ),
    "train": Stage(
        version=2,
        computed_by=("serin.training.programs", "serin.training.foreign"),
        libraries=("torch", "triton", "numpy", "xgboost", "onnx", "onnxruntime", "safetensors"),
    ),
    "export": Stage(
        version=2,
        computed_by=("serin.export.build:export_model", "serin.etl.raw_rows"),
        libraries=(
            "torch", "numpy", "pandas", "pyarrow", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "xgboost",
            "tensorrt", "safetensors",
        ),
    ),
}  # fmt: skip
_ALSO_CALLED: Mapping[str, tuple[str, ...]] = {
    "cudf": ("cudf-cu12", "cudf-cu13"),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x"),
    "onnxruntime": ("onnxruntime-gpu",),
    "tensorrt": ("tensorrt-cu12", "tensorrt-cu13"),
    "xgboost": ("xgboost-cpu",),
}
"""Distributions that bring the library under another name."""
_WORDS = {
    "sources": "Serin's code for it",
    "versions": "versions of libraries",
    "own_code": "your code",
    "operators": "your operators",
}

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
        stage=stage, parts={**named, "sources": sources_digest(stage), "versions": versions(stage)}
    )


def environment_part(*, runs_own_code: bool) -> dict[str, str]:
    """The part of a key for the environment that this process is in: of stages that run the user's code."""
    now = entered()
    return {"environment": now.digest} if runs_own_code and now is not None else {}


def sources_digest(stage: str) -> str:
    """Returns a digest of Serin's code that computes the stage's result, and of the stage's version; a process that has
    begun uses the one it began with."""
    code = digest_of_own(STAGES[stage].computed_by, otherwise=environment.home() / "stages" / "code")
    return _digest([STAGES[stage].version, code])


@functools.cache
def versions(stage: str) -> str:
    """Of Python and of the installed libraries that decide the stage's result, as `name=version`."""
    found = [f"python={platform.python_version()}"]
    for library in STAGES[stage].libraries:
        for name in (library, *_ALSO_CALLED.get(library, ())):
            with suppress(importlib.metadata.PackageNotFoundError):
                found.append(f"{name}={importlib.metadata.version(name)}")
    return " ".join(found)


def made_by(stage: str) -> str:
    """Serin's code and the libraries that a stage is done by: other ones may give another result."""
    return _digest([sources_digest(stage), versions(stage)])


def remember(home: Path, name: str, key: StageKey) -> None:
    """Records that the stage was done for the pipeline `name`, so that `why` can compare."""
    path = _last(home, name, key.stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dict(key.parts)))


def why(home: Path, name: str, key: StageKey, *, fresh: bool = False) -> str:
    """Returns why the stage has to run."""
    if fresh:
        return "asked for by --fresh"
    try:
        last: dict[str, str] = json.loads(_last(home, name, key.stage).read_text())
    except (OSError, ValueError):
        return "no earlier result"
    changed = [
        _describe(part, last.get(part), now) for part, now in key.parts.items() if last.get(part) != now
    ]
    return f"changed since the last time: {', '.join(changed)}" if changed else "its result is gone"


def note(
    home: Path,
    run: str,
    stage: str,
    *,
    ran: bool,
    why: str,
    version: tuple[str, int] | None = None,
    receipt: str | None = None,
    environment: str | None = None,
) -> None:
    """The outcome of a stage in a run, for `serin runs`. `version`: the model version it published, if any; `receipt`:
    the file of its receipt, relative to the home; `environment`: in which the user's code ran."""
    path = notes_file(home, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        entry = {"stage": stage, "ran": ran, "why": why, "version": version, "receipt": receipt}
        entry["environment"] = environment
        file.write(json.dumps({name: value for name, value in entry.items() if value is not None}) + "\n")


def notes(home: Path, run: str) -> list[dict[str, Any]]:
    """Returns the last outcome of each stage in a run, in the order of the first."""
    try:
        lines = notes_file(home, run).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            found[entry["stage"]] = {**found.get(entry["stage"], {}), **entry}
        except (ValueError, KeyError, TypeError):
            continue  # cut short by a crash
    return list(found.values())


def _describe(part: str, before: str | None, now: str) -> str:
    words = _WORDS.get(part, part)
    if part != "versions" or before is None:
        return words
    old, new = set(before.split()), set(now.split())
    return f"{words} ({', '.join(sorted(old - new))} -> {', '.join(sorted(new - old))})"


def _plain(part: Part) -> Any:
    if isinstance(part, tuple):
        return [_plain(section) for section in part]
    return said(part) if isinstance(part, Section) else part


def said(section: Section) -> str:
    """All that a section says, in its order: of tables the first is the main one, of targets each has its place."""
    return json.dumps(section.model_dump(mode="json", by_alias=True))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _last(home: Path, name: str, stage: str) -> Path:
    return home / "stages" / stage / f"last-{name}.parts"


def notes_file(home: Path, run: str) -> Path:
    """The notes about one run of the orchestrator, a line of JSON each."""
    return home / "stages" / "runs" / f"{run}.jsonl"
