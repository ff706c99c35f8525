"""Renders the reference of the spec from its JSON schema: every key with its type, default and meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from serin.spec.json_schema import spec_schema
from serin.spec.section import shortest, size_text
from serin.spec.steps.operators import operators

_HEAD = """\
# Spec reference

A pipeline is one YAML file. This page lists every key. `serin check SPEC` reports all problems of a
file at once.

A **duration** is a number of seconds, or a number with a unit: `500us`, `20ms`, `30s`, `10m`, `1.5h`, `90d`.
A **size** is a number of bytes, or a number with a unit: `64KiB`, `500MB`, `10GB`.
A **rate** is a number per year, or a number with a period: `1 per year`, `2 per month`, `1 per week`.

`serin schema --out spec.schema.json` writes the same as a JSON schema. An editor with a YAML language
server shows this text, completes keys and marks mistakes when the first line of the spec is
`# yaml-language-server: $schema=spec.schema.json`. `serin init` writes both.
"""
_STEPS = """\
### Steps

A step is written as its name (`normalize`), as its name with arguments (`clip: {q: [0.01, 0.99]}`), or,
where an argument is marked with \\*, as its name with that argument alone (`fill_missing: 3`). Your own
operator is named by its import path (`package.module:Class`); see
[Features](../how-to/features.md#your-own-operator).
"""
Schema = Mapping[str, Any]


def render() -> str:
    schema = spec_schema()
    known: dict[str, Schema] = schema["$defs"]
    parts = [_HEAD, "## Top level", _table(schema, known)]
    for key, field in schema["properties"].items():
        parts += _section(key, field, known, depth=2)
        if key == "features":
            parts += [_STEPS, *_steps(known)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _section(place: str, field: Schema, known: Mapping[str, Schema], *, depth: int) -> Iterator[str]:
    """The heading, the summary and the keys of the section that `field` holds, then those inside it."""
    found = _sections_in(field, known)
    for suffix, section in found:
        kind = f" with `{next(iter(section['properties']))}`" if len(found) > 1 else ""
        yield f"{'#' * depth} `{place}{suffix}`{kind}"
        yield section.get("description", "")
        yield _table(section, known)
        for key, inner in section["properties"].items():
            yield from _section(f"{place}{suffix}.{key}", inner, known, depth=min(depth + 1, 4))


def _sections_in(field: Schema, known: Mapping[str, Schema], suffix: str = "") -> list[tuple[str, Schema]]:
    if "$ref" in field:
        return [(suffix, _named(field, known))] if "properties" in _named(field, known) else []
    if "items" in field:
        return _sections_in(field["items"], known, "[]")
    if isinstance(field.get("additionalProperties"), dict):
        return _sections_in(field["additionalProperties"], known, ".*")
    forms = (*field.get("anyOf", ()), *field.get("oneOf", ()))
    return [found for each in forms for found in _sections_in(each, known, suffix)]


def _steps(known: Mapping[str, Schema]) -> Iterator[str]:
    for name, kind in operators().items():
        yield f"#### `{name}`"
        yield " ".join(kind.summary.split())
        if kind.model_fields:
            yield _table(known[kind.__name__], known, marked=kind.positional)


def _table(section: Schema, known: Mapping[str, Schema], *, marked: str | None = None) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    required = section.get("required", ())
    for key, field in section["properties"].items():
        default = "required" if key in required else _default(field, known)
        meaning = field.get("description", "")
        cells = (f"`{key}`" + (" \\*" if key == marked else ""), type_text(field, known), default, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def type_text(field: Schema, known: Mapping[str, Schema]) -> str:
    """What may be written for a key, in words."""
    if "examples" in field and {each.get("type") for each in field.get("anyOf", ())} == {"number", "string"}:
        first = field["examples"][0]
        return "rate" if "per " in first else "size" if first.endswith("B") else "duration"
    if "$ref" in field:
        return {"JsonValue": "any value", "FeatureStep": "step"}.get(
            field["$ref"].rpartition("/")[2], "section"
        )
    if "const" in field or "enum" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "anyOf" in field or "oneOf" in field:
        forms = (*field.get("anyOf", ()), *field.get("oneOf", ()))
        texts = [type_text(each, known) for each in forms if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(texts))
    match field.get("type"):
        case "array" if "prefixItems" in field:
            return "[" + ", ".join(type_text(each, known) for each in field["prefixItems"]) + "]"
        case "array":
            return f"list of {_plural(type_text(field.get('items', {}), known))}"
        case "object":
            inner = field.get("additionalProperties")
            return f"mapping to {_plural(type_text(inner, known))}" if isinstance(inner, dict) else "mapping"
        case "integer" | "number" as kind:
            return f"{kind}{_bounds(field)}"
        case str() as kind:
            return kind
    return "any value"


def _named(field: Schema, known: Mapping[str, Schema]) -> Schema:
    return known[str(field["$ref"]).rpartition("/")[2]]


def _plural(text: str) -> str:
    return f"{text}s" if text in ("string", "integer", "number", "section", "step") else text


def _bounds(field: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {field[name]:g}" for name, sign in signs.items() if name in field]
    return f" {', '.join(found)}" if found else ""


def _default(field: Schema, known: Mapping[str, Schema]) -> str:
    value, kind = field.get("default", {}), type_text(field, known)
    if value is None:
        return "not set"
    if kind == "section":
        return "its defaults"
    if kind == "duration":
        value = shortest(value) if value else "0s"
    if kind == "size":
        value = size_text(value)
    if kind == "rate":
        value = f"{value:g} per year"
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"
