"""Values are kept within bounds: fixed ones, or quantiles of the training split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from pydantic import model_validator

from serin.columns.column import array_module
from serin.features.aggregates.aggregate import Fit
from serin.features.fitted import FittedNumbers, Floats
from serin.features.operator import Finite, NumberOperator, Source, float32_of, register, rising

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


class Clip(NumberOperator):
    """Limit values to fixed bounds (`min`, `max`) or to quantiles of the training split (`q`)."""

    name = "clip"
    keeps_unit = True
    min: Finite | None = None
    """The lower bound. By default none."""
    max: Finite | None = None
    """The upper bound. By default none."""
    q: tuple[float, float] | None = None
    """The quantiles of the training split that become the bounds, such as [0.001, 0.999]."""

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> Self:
        if (self.q is None) == (self.min is None and self.max is None):
            raise ValueError("give either q: [low, high] or min and/or max")
        if self.q is not None:
            rising(self.q, "[0.001, 0.999]")
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError(f"min={self.min:g} must be below max={self.max:g}")
        return self

    def fit(self, source: Source) -> Fit[FittedClip]:
        if self.q is None:
            return FittedClip(_float32(self.min), _float32(self.max))
        low, high = yield from source.distribution.quantiles(self.q)
        return FittedClip(low, high)


@dataclass(frozen=True, slots=True)
class FittedClip(FittedNumbers):
    """None: no bound on that side. The bounds are float32 values."""

    low: float | None
    high: float | None

    def transform(self, values: Floats) -> Floats:
        xp = array_module(values)
        # By comparison: NaN stays NaN, and it does not depend on the processor's max(0, -0).
        if self.low is not None:
            values = xp.where(values < np.float32(self.low), np.float32(self.low), values)
        if self.high is not None:
            values = xp.where(values > np.float32(self.high), np.float32(self.high), values)
        return values

    @property
    def shape(self) -> tuple[str, ...]:
        return ("clip", *(side for side in ("low", "high") if getattr(self, side) is not None))

    @classmethod
    def to_onnx(
        cls, graph: GraphBuilder, values: str, null: str | None, steps: Sequence[FittedClip]
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


def _float32(value: float | None) -> float | None:
    return None if value is None else float32_of(value)


register(Clip, FittedClip)
