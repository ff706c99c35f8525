"""What all fills share: nulls become one value. A fill differs from another only in where the value comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from serin.columns.column import any_true, array_module
from serin.features.fitted import Floats

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


@dataclass(frozen=True, slots=True)
class Fill:
    """`value` is a float32 value, and never -0."""

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    why: ClassVar[str]
    value: float

    def transform(self, values: Floats) -> Floats:
        null = np.isnan(values)
        if not any_true(null):
            return values
        filled: Floats = array_module(values).where(null, np.float32(self.value), values)
        return filled

    @property
    def shape(self) -> tuple[str, ...]:
        return ("fill",)

    @classmethod
    def to_onnx(
        cls, graph: GraphBuilder, values: str, null: str | None, steps: Sequence[Fill]
    ) -> tuple[str, str | None]:
        if null is None:
            return values, None
        constants = graph.constant(np.asarray([step.value for step in steps], np.float32), "fill")
        return graph.op("Where", null, constants, values), None

    def describe(self) -> str:
        return f"null becomes {self.value:g} ({self.why})"

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Self:
        return cls(float(document["value"]))


def float32_of(value: float) -> float:
    """The nearest float32; never -0."""
    return float(np.float32(value)) + 0.0
