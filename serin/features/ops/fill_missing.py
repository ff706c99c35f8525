"""Nulls become a value that the spec gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from serin.features.aggregates.distribution import Distribution
from serin.features.filling import Fill, float32_of
from serin.spec import steps as spec


@dataclass(frozen=True, slots=True)
class FillMissing(Fill):
    name: ClassVar[str] = "fill_missing"
    why: ClassVar[str] = "given"

    @classmethod
    def given(cls, step: spec.FillMissing, data: Distribution) -> Distribution:
        fill = cls(float32_of(float(step.value)))
        return data.after_fill(fill, fill.value)
