"""Nulls become the training split's median: the lower one of two, so that it is a value that occurs."""

from __future__ import annotations

from collections.abc import Sequence
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
        step = cls(data.made_of(raw) + 0.0)  # never -0
        if data.filled is None:
            data = replace(data, filled=(raw, data.nulls))
        return step, data.after(step)

    def transform(self, values: Floats) -> Floats:
        null = np.isnan(values)
        return np.where(null, np.float32(self.value), values) if null.any() else values

    @property
    def shape(self) -> tuple[str, ...]:
        return (self.name,)

    @classmethod
    def to_onnx(
        cls, graph: GraphBuilder, values: str, null: str | None, steps: Sequence[FillMedian]
    ) -> tuple[str, str | None]:
        if null is None:
            return values, None
        medians = graph.constant(np.asarray([step.value for step in steps], np.float32), "medians")
        return graph.op("Where", null, medians, values), None

    def describe(self) -> str:
        return f"null becomes {self.value:g} (median)"

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> FillMedian:
        return cls(float(document["value"]))
