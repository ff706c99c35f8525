"""Values are kept within bounds: fixed ones, or quantiles of the training split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from serin.columns.column import array_module
from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.distribution import Distribution
from serin.features.filling import float32_of
from serin.features.fitted import Floats
from serin.spec import steps as spec

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


@dataclass(frozen=True, slots=True)
class Clip:
    """None: no bound on that side. The bounds are float32 values."""

    name: ClassVar[str] = "clip"
    exact: ClassVar[bool] = True
    low: float | None
    high: float | None

    @classmethod
    def fit(cls, step: spec.Clip, data: Distribution) -> Fit[Distribution]:
        if step.q is None:
            return data.after(cls(_float32(step.min), _float32(step.max)))
        low, high = yield from data.quantiles(step.q)
        return data.after(cls(low, high))

    def transform(self, values: Floats) -> Floats:
        xp = array_module(values)
        # By comparison: NaN stays NaN, and no processor's idea of max(0, -0) comes in.
        if self.low is not None:
            values = xp.where(values < np.float32(self.low), np.float32(self.low), values)
        if self.high is not None:
            values = xp.where(values > np.float32(self.high), np.float32(self.high), values)
        return values

    @property
    def shape(self) -> tuple[str, ...]:
        return (self.name, *(side for side in ("low", "high") if getattr(self, side) is not None))

    @classmethod
    def to_onnx(
        cls, graph: GraphBuilder, values: str, null: str | None, steps: Sequence[Clip]
    ) -> tuple[str, str | None]:
        for side, outside in (("low", "Less"), ("high", "Greater")):
            if side in steps[0].shape:
                bounds = graph.constant(np.asarray([getattr(step, side) for step in steps], np.float32), side)
                values = graph.op("Where", graph.op(outside, values, bounds), bounds, values)
        return values, null

    def describe(self) -> str:
        low = "-inf" if self.low is None else f"{self.low:g}"
        high = "inf" if self.high is None else f"{self.high:g}"
        return f"kept within {low} and {high}"

    def to_json(self) -> dict[str, Any]:
        return {"low": self.low, "high": self.high}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Clip:
        return cls(document["low"], document["high"])


def _float32(value: float | None) -> float | None:
    return None if value is None else float32_of(value)
