"""Periodic values as points on a circle: sine and cosine, so that the end is next to the beginning.

Parts of a time (UTC), or a number with a period. In float64, stored as float32 (class B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from serin.columns.column import array_module
from serin.features.aggregates.aggregate import Fit, ready
from serin.features.fitted import Floats, Sample, StoredFields
from serin.features.numbers import Numbers
from serin.features.operator import Operator, Source, register
from serin.features.ops.date_parts import PART_SIZES, FittedDateParts, Part
from serin.formats.schema import Kind
from serin.spec.steps.step import NUMBERS, TIMES, Made

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

_FLOAT, _DOUBLE = 1, 11  # onnx.TensorProto


class Cyclical(Operator):
    """Sine and cosine of `parts` of a time (UTC), or of a number with a `period`."""

    name = "cyclical"
    kinds = (*TIMES, *NUMBERS)
    gives = "end"
    exact = False
    positional = "parts"
    parts: tuple[Part, ...] | None = Field(default=None, min_length=1)
    """The parts of a time."""
    period: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The period of a number, such as 24 for hours."""

    @model_validator(mode="after")
    def _turns_something(self) -> Self:
        if (self.parts is None) == (self.period is None):
            raise ValueError("give either parts: [hour, weekday] of a time, or the period of a number")
        return self

    @property
    def can_follow(self) -> tuple[Made, ...]:
        return ("raw", "numbers") if self.parts is None else ("raw",)

    @property
    def needs_exact(self) -> bool:
        return True

    def accepted(self) -> tuple[str, ...]:
        return NUMBERS if self.parts is None else TIMES

    def names(self, name: str) -> tuple[str, ...]:
        bases = [name] if self.parts is None else [f"{name}_{part}" for part in self.parts]
        return tuple(f"{base}_{axis}" for base in bases for axis in ("sin", "cos"))

    def fit(self, source: Source) -> Fit[FittedCyclical | FittedCyclicalParts]:
        if self.parts is not None:
            return ready(FittedCyclicalParts(column=source.column, parts=self.parts))
        assert self.period is not None
        return ready(FittedCyclical(inner=source.distribution.numbers, period=self.period))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedCyclicalParts(StoredFields):
    exact: ClassVar[bool] = False
    inner: ClassVar[None] = None
    column: str
    parts: tuple[str, ...]

    @property
    def columns(self) -> Mapping[str, Kind]:
        return {self.column: "timestamp"}

    def outputs(self) -> tuple[str, ...]:
        return tuple(f"{self.column}_{part}_{axis}" for part in self.parts for axis in ("sin", "cos"))

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        column = sample.columns[self.column]
        xp = array_module(column.values)
        made = zip(self.parts, FittedDateParts(self.parts).transform(column), strict=True)
        return tuple(xp.asarray(table)[codes] for part, codes in made for table in _tables(part))

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        codes = FittedDateParts(self.parts).to_onnx(graph, inputs[self.column], "timestamp")
        return tuple(
            graph.op("Gather", graph.constant(table, part), own, axis=0)
            for part, own in zip(self.parts, codes, strict=True)
            for table in _tables(part)
        )

    def describe(self) -> str:
        return f"sine and cosine of {', '.join(self.parts)} (UTC)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedCyclical:
    """The remainder by the period is taken first, by exact steps: the sine of a large number is never needed."""

    exact: ClassVar[bool] = False
    slack: ClassVar[float] = 2.0**-46  # near 0 a sine is as exact as its angle: this far off in float64
    inner: Numbers
    period: float

    @property
    def columns(self) -> Mapping[str, Kind]:
        return self.inner.columns

    def outputs(self) -> tuple[str, ...]:
        name = self.inner.name
        return (f"{name}_sin", f"{name}_cos")

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        values = self.inner.of(sample)
        wide = array_module(values).where(np.isfinite(values), values, np.float32("nan")).astype(np.float64)
        rest = wide - np.floor(wide / self.period) * self.period
        angle = rest * (2 * math.pi / self.period)
        return np.sin(angle).astype(np.float32), np.cos(angle).astype(np.float32)

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        values = self.inner.to_onnx(graph, inputs)
        nan = graph.constant(np.float32("nan"), "nan")
        wide = graph.op("Cast", graph.op("Where", graph.op("IsInf", values), nan, values), to=_DOUBLE)
        period = graph.constant(np.float64(self.period), "period")
        whole = graph.op("Mul", graph.op("Floor", graph.op("Div", wide, period)), period)
        turn = graph.constant(np.float64(2 * math.pi / self.period), "turn")
        angle = graph.op("Mul", graph.op("Sub", wide, whole), turn)
        return tuple(graph.op("Cast", graph.op(axis, angle), to=_FLOAT) for axis in ("Sin", "Cos"))

    def describe(self) -> str:
        before = self.inner.describe()
        return f"{before}{'; ' if before else ''}sine and cosine with period {self.period:g}"

    def to_json(self) -> dict[str, Any]:
        return {"period": self.period}

    @classmethod
    def from_json(cls, document: dict[str, Any], inner: Numbers) -> FittedCyclical:
        return cls(inner=inner, period=float(document["period"]))


def _tables(part: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Sine and cosine by code; code 0 is null."""
    angle = np.arange(PART_SIZES[part]) * (2 * math.pi / PART_SIZES[part])
    null = np.asarray([np.nan])
    sine, cosine = (
        np.concatenate([null, made]).astype(np.float32) for made in (np.sin(angle), np.cos(angle))
    )
    return sine, cosine


register(Cyclical, FittedCyclical, also={"cyclical_parts": FittedCyclicalParts})
