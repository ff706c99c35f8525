"""The spec as a JSON schema: for the form in Prefect's pages, which refuses what cannot be a spec before anything runs.

Where a key has a short form (`10m`, `clip: {...}`), the schema lets anything pass: load.py judges it, in its own words.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from serin.spec.pipeline import PipelineSpec

_SHORT_FORM: JsonSchemaValue = {"title": "short form"}


class _WithShortForms(GenerateJsonSchema):
    """What a validator of ours sees before pydantic does may have another form than the one that comes out."""

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        return {"anyOf": [self.generate_inner(schema["schema"]), _SHORT_FORM]}

    def function_wrap_schema(self, schema: core_schema.WrapValidatorFunctionSchema) -> JsonSchemaValue:
        return {"anyOf": [self.generate_inner(schema["schema"]), _SHORT_FORM]}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        if "properties" not in found:  # they stand inside, and what pydantic says of them with them
            found.pop("additionalProperties", None)
        return found

    def function_plain_schema(self, schema: core_schema.PlainValidatorFunctionSchema) -> JsonSchemaValue:
        del schema
        return dict(_SHORT_FORM)


def spec_schema() -> dict[str, Any]:
    """Of one whole spec, without references to elsewhere: what PipelineSpec accepts, and somewhat more."""
    return _inlined(PipelineSpec.model_json_schema(schema_generator=_WithShortForms))


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Definitions put where they are used: the schema becomes a part of a flow's, which has definitions of its own."""
    known = schema.pop("$defs", {})

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            named = value.get("$ref")
            if isinstance(named, str):
                return {
                    **put(known[named.rpartition("/")[2]]),
                    **{k: v for k, v in value.items() if k != "$ref"},
                }
            return {key: put(inner) for key, inner in value.items()}
        return [put(inner) for inner in value] if isinstance(value, list) else value

    found: dict[str, Any] = put(schema)
    return found
