"""Renders the reference of the spec from its JSON schema: every key with its type, default and meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serin.spec.pipeline import PipelineSpec

_HEAD = """# The spec

This page is generated from `PipelineSpec`. A spec is one YAML file; unknown keys are refused. Paths of data are
relative to the spec's file. Durations are written as `30s`, `10m`, `1.5h` or `90d`.
"""


def render() -> str:
    schema = PipelineSpec.model_json_schema()
    return "\n".join([_HEAD, *_section("", schema, schema.get("$defs", {}))])


def _section(path: str, schema: dict[str, Any], known: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    rows = [
        f"| `{name}` | {_type(field, known)} | {_default(name, field, required)} | {_meaning(field)} |"
        for name, field in schema["properties"].items()
    ]
    yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])
    for name, field in schema["properties"].items():
        for inner in _objects(field, known):
            below = f"{path}.{name}" if path else name
            yield f"\n{'##' if not path else '###'} `{below}`\n"
            yield from _section(below, inner, known)


def _objects(field: dict[str, Any], known: dict[str, Any]) -> list[dict[str, Any]]:
    """The sections that a field may hold: itself, one of several, or the items of a list."""
    if "$ref" in field:
        found = known[field["$ref"].rpartition("/")[2]]
        return [found] if "properties" in found else []
    parts = [*field.get("anyOf", ()), *field.get("oneOf", ())]
    parts += [field[key] for key in ("items", "additionalProperties") if isinstance(field.get(key), dict)]
    return [found for part in parts for found in _objects(part, known)]


def _type(field: dict[str, Any], known: dict[str, Any]) -> str:
    if "$ref" in field:
        found = known[field["$ref"].rpartition("/")[2]]
        return "section" if "properties" in found else _type(found, known)
    if "const" in field or "enum" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "anyOf" in field or "oneOf" in field:
        types = [_type(part, known) for part in (*field.get("anyOf", ()), *field.get("oneOf", ()))]
        return " or ".join(dict.fromkeys(kind for kind in types if kind != "null"))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field.get('items', {}), known)}"
    if kind == "object":
        values = field.get("additionalProperties")
        return f"mapping to {_type(values, known)}" if isinstance(values, dict) else "mapping"
    return kind


def _default(name: str, field: dict[str, Any], required: list[str]) -> str:
    if name in required:
        return "required"
    default = field.get("default")
    if default is None or isinstance(default, dict | list):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _meaning(field: dict[str, Any]) -> str:
    return " ".join(str(field.get("description", "")).split()).replace("|", "\\|")
