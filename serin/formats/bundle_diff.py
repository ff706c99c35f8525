"""What two model versions differ in: what they ask and answer, their specs, numbers, origins and files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from serin.errors import BundleBroken
from serin.formats.bundle import read_manifest
from serin.formats.schema import read_schema
from serin.machine.documents import read_facts


class Difference(NamedTuple):
    """`what` is a dotted path below its part; a side that lacks it has None."""

    part: str
    what: str
    left: Any
    right: Any


def diff_bundles(left: Path, right: Path) -> list[Difference]:
    """Every difference, part by part. Numbers of the gate that no two runs share (times) are left out."""
    sides = [_parts(folder) for folder in (left, right)]
    found: list[Difference] = []
    for part in dict.fromkeys((*sides[0], *sides[1])):
        one, other = (dict(_flat(side.get(part, {}))) for side in sides)
        changed = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
        found += [Difference(part, key, one.get(key), other.get(key)) for key in changed]
    return found


def _parts(folder: Path) -> dict[str, Any]:
    manifest, schema = read_manifest(folder), read_schema(folder).to_json()
    gate = read_facts(folder / "gate.json", dict) if (folder / "gate.json").is_file() else {}
    return {
        "inputs": {column["name"]: _without(column, "name") for column in schema["inputs"]},
        "outputs": {output["name"]: _without(output, "name") for output in schema["outputs"]},
        "metrics": manifest.metrics,
        "variant": {"chosen": gate.get("chosen"), "threads": gate.get("runtime", {}).get("threads")},
        "spec": _spec(folder),
        "lineage": manifest.lineage,
        "files": {name: f"{file.sha256[:12]}, {file.size} bytes" for name, file in manifest.files.items()},
    }


def _spec(folder: Path) -> Any:
    path = folder / "spec.yaml"
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BundleBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error


def _without(entry: Mapping[str, Any], key: str) -> str:
    return ", ".join(f"{name} {value}" for name, value in entry.items() if name != key)


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}[{index}]")
    else:
        yield prefix, value
