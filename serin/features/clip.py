"""Values are kept within bounds: fixed ones, or quantiles of the training split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from serin.features.distribution import Distribution
from serin.features.requests import Fit
from serin.features.steps import Floats
from serin.spec import steps as spec

if TYPE_CHECKING:
    from serin.features.graph import GraphBuilder


@dataclass(frozen=True, slots=True)
class Clip:
    """None: no bound on that side. The bounds are float32 values."""

    name: ClassVar[str] = "clip"
    low: float | None
    high: float | None

    @classmethod
    def fit(cls, step: spec.Clip, data: Distribution) -> Fit[tuple[Clip, Distribution]]:
        if step.q is None:
            fitted = cls(_float32(step.min), _float32(step.max))
        else:
            low = yield from data.quantile(step.q[0])
            high = yield from data.quantile(step.q[1])
            fitted = cls(data.made_of(low) + 0.0, data.made_of(high) + 0.0)  # never -0
        return fitted, data.after(fitted)

    def transform(self, values: Floats) -> Floats:
        if (
            self.low is not None
        ):  # by comparison: NaN stays NaN, and no processor's idea of max(0, -0) comes in
            values = np.where(values < np.float32(self.low), np.float32(self.low), values)
        if self.high is not None:
            values = np.where(values > np.float32(self.high), np.float32(self.high), values)
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
    return None if value is None else float(np.float32(value)) + 0.0
