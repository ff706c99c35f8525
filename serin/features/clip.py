"""Values are kept within bounds: fixed ones, or quantiles of the training split."""

from __future__ import annotations

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
            fitted = cls(data.made_of(low), data.made_of(high))
        return fitted, data.after(fitted)

    def transform(self, values: Floats) -> Floats:
        if self.low is not None:
            values = np.maximum(values, np.float32(self.low))  # NaN stays NaN
        if self.high is not None:
            values = np.minimum(values, np.float32(self.high))
        return values

    def to_onnx(self, graph: GraphBuilder, values: str, null: str | None) -> tuple[str, str | None]:
        low = "" if self.low is None else graph.constant(np.float32(self.low), "low")
        high = "" if self.high is None else graph.constant(np.float32(self.high), "high")
        return graph.op("Clip", values, low, high), null

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
    return None if value is None else float(np.float32(value))
