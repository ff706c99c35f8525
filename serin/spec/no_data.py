"""A pipeline without tables: a model that defines its own inputs is trained by its script, or was trained elsewhere.

In YAML the section is left out; in Python it is a section with no tables, so that nobody has to ask for None.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, SerializerFunctionWrapHandler, WrapSerializer

from serin.spec.data import DataSpec
from serin.spec.target import TargetSpec

NO_DATA = DataSpec.model_construct(
    tables={}, target=TargetSpec.model_construct(expression="", task="regression")
)


def _or_none(given: Any) -> Any:
    return NO_DATA if given is None else given


def _as_none(data: DataSpec, written: SerializerFunctionWrapHandler) -> Any:
    return written(data) if data.tables else None


MaybeData = Annotated[
    DataSpec, BeforeValidator(_or_none, json_schema_input_type=DataSpec | None), WrapSerializer(_as_none)
]
