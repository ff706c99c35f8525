"""Nulls become a value that the spec gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from serin.features.aggregates.aggregate import Fit, ready
from serin.features.filling import Fill, FillOperator, float32_of
from serin.features.operator import Finite, Source, register


class FillMissing(FillOperator):
    """Nulls become a given value."""

    name = "fill_missing"
    positional = "value"
    value: Finite = 0.0
    """The value that replaces nulls."""

    def fit(self, source: Source) -> Fit[FittedFillMissing]:
        del source
        return ready(FittedFillMissing(float32_of(float(self.value))))


@dataclass(frozen=True, slots=True)
class FittedFillMissing(Fill):
    why: ClassVar[str] = "given"


register(FillMissing, FittedFillMissing)
