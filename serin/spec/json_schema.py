"""The spec as a JSON schema: for YAML editors (`serin schema`) and for the form in Prefect's pages.

It describes what a spec may look like, short forms included. Rules that involve several keys are left to load.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic.json_schema import GenerateJsonSchema, JsonRef, JsonSchemaValue
from pydantic_core import core_schema

from serin.spec.kind_settings import USED_BY
from serin.spec.model import KINDS, SOURCES
from serin.spec.pipeline import PipelineSpec
from serin.spec.section import Section, key_descriptions
from serin.spec.steps.operators import operators
from serin.spec.steps.step import FeatureStep

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OWN_OPERATOR = "^[^:]+:[^:]+$"  # package.module:Class


def spec_schema() -> dict[str, Any]:
    """The schema of one spec, with a definition for each section."""
    found = PipelineSpec.model_json_schema(schema_generator=_SpecSchema)
    return {"$schema": DIALECT, **found, "title": "Serin pipeline"}


def editor_schema() -> dict[str, Any]:
    """The same, with `model` as a union by its kind, so that an editor offers only the keys that the kind uses. Where a
    search tries several kinds, the keys of all of them may be set."""
    schema = spec_schema()
    properties, known = schema["properties"], schema["$defs"]
    whole = properties["model"]
    properties["model"] = {"description": whole["description"]}
    known |= {f"Model_{kind}": _only(known["ModelSpec"], kind) for kind in get_args(KINDS)}
    space = {"space": {"required": ["model.kind"]}}
    several = {"required": ["search"], "properties": {"search": {"required": ["space"], "properties": space}}}
    union = {"anyOf": [{"$ref": f"#/$defs/Model_{kind}"} for kind in get_args(KINDS)]}
    return {
        **schema,
        "if": several,
        "then": {"properties": {"model": whole}},
        "else": {"properties": {"model": union}},
    }


def _only(model: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The section `model` of one kind. A source, such as `onnx: model.onnx`, says its kind by itself."""
    used = {name: each for name, each in model["properties"].items() if kind in USED_BY[f"model.{name}"]}
    used["kind"] = {"const": kind, "description": used["kind"]["description"]}
    needed = [] if kind == "mlp" else [kind if kind in SOURCES else "kind"]
    return {**model, "title": kind, "properties": used, "required": needed}


def inlined_schema() -> dict[str, Any]:
    """The same without definitions: it becomes a part of a flow's schema, which has its own definitions."""
    schema = spec_schema()
    del schema["$schema"]
    known = schema.pop("$defs", {})

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            named = value.get("$ref")
            if isinstance(named, str):
                rest = {key: inner for key, inner in value.items() if key != "$ref"}
                return {**put(known[named.rpartition("/")[2]]), **rest}
            return {key: put(inner) for key, inner in value.items()}
        return [put(inner) for inner in value] if isinstance(value, list) else value

    found: dict[str, Any] = put(schema)
    return found


class _SpecSchema(GenerateJsonSchema):
    """Sections are described by their own docstring, and a step by all of its notations."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        if schema["cls"] is FeatureStep:
            return self._any_step()
        found = super().model_schema(schema)
        found.pop("description", None)
        section = schema["cls"]
        if not issubclass(section, Section):
            return found
        if section.summary:
            found["description"] = " ".join(section.summary.split())
        described = key_descriptions(section)
        for name, field in section.model_fields.items():
            if name in described:
                found["properties"][field.alias or name]["description"] = described[name]
        return found

    def _any_step(self) -> JsonSchemaValue:
        """A step's name, or its name with arguments: all of them by key, or the most important one alone."""
        kinds = operators()
        plain = [name for name, kind in kinds.items() if not _required(kind)]
        with_arguments = {
            "type": "object",
            "properties": {name: self._arguments(kind) for name, kind in kinds.items()},
            "patternProperties": {OWN_OPERATOR: {"type": ["object", "null"]}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        }
        return {
            "anyOf": [
                {"enum": plain, "type": "string"},
                {"pattern": OWN_OPERATOR, "type": "string", "description": "Your own operator."},
                with_arguments,
            ]
        }

    def _arguments(self, kind: type[FeatureStep]) -> JsonSchemaValue:
        by_key = self.generate_inner(kind.__pydantic_core_schema__)
        forms: list[JsonSchemaValue] = [by_key]
        if not _required(kind):
            forms.append({"type": "null"})
        if kind.positional is not None:
            section = self.get_schema_from_definitions(JsonRef(by_key["$ref"])) or {}
            alone = section["properties"][kind.positional]
            forms.append({key: value for key, value in alone.items() if key not in ("title", "default")})
        return {"anyOf": forms, "description": " ".join(kind.summary.split())}


def _required(kind: type[FeatureStep]) -> bool:
    return any(field.is_required() for field in kind.model_fields.values())
