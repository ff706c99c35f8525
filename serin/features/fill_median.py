"""Nulls become the training split's median: the lower one of two, so that it is a value that occurs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from serin.features.distribution import Distribution
from serin.features.requests import Fit
from serin.features.steps import Floats

if TYPE_CHECKING:
    from serin.features.graph import GraphBuilder


@dataclass(frozen=True, slots=True)
class FillMedian:
    name: ClassVar[str] = "fill_median"
    value: float

    @classmethod
    def fit(cls, data: Distribution) -> Fit[tuple[FillMedian, Distribution]]:
        raw = yield from data.quantile(0.5)
        step = cls(data.made_of(raw))
        if data.filled is None:
            data = replace(data, filled=(raw, data.nulls))
        return step, data.after(step)

    def transform(self, values: Floats) -> Floats:
        null = np.isnan(values)
        return np.where(null, np.float32(self.value), values) if null.any() else values

    def to_onnx(self, graph: GraphBuilder, values: str, null: str | None) -> tuple[str, str | None]:
        if null is None:
            return values, None
        return graph.op("Where", null, graph.constant(np.float32(self.value), "median"), values), None

    def describe(self) -> str:
        return f"null becomes {self.value:g} (median)"

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FillMedian:
        return cls(float(document["value"]))
