"""Nulls become one value: given, or the training split's median or commonest value. The fills differ only in where the
value comes from. A fill may add an indicator: 1 where a value is null, else 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from serin.columns.column import any_true, array_module
from serin.features.aggregates.aggregate import Fit, ready
from serin.features.aggregates.value_counts import NumberCounts, ValueTable
from serin.features.fitted import FittedNumbers, Floats
from serin.features.operator import (
    Finite,
    NumberOperator,
    Source,
    float32_of,
    register,
    register_fitted,
)

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder

_FLOAT = 1  # onnx.TensorProto.FLOAT


class FillOperator(NumberOperator):
    """An operator that gives nulls a value."""

    fills = True
    keeps_unit = True
    indicator: bool = False
    """Also add a column `<name>_missing`: 1 where the value was null, 0 elsewhere."""

    def beside(self, name: str) -> tuple[str, ...]:
        return (f"{name}_missing",) if self.indicator else ()


@dataclass(frozen=True, slots=True)
class Fill(FittedNumbers):
    """`value` is a float32 value, and never -0."""

    why: ClassVar[str]
    value: float

    @property
    def null_becomes(self) -> float:
        return self.value

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


@dataclass(frozen=True, slots=True)
class Missing(FittedNumbers):
    def transform(self, values: Floats) -> Floats:
        return np.isnan(values).astype(np.float32)

    @classmethod
    def to_onnx(
        cls,
        graph: GraphBuilder,
        values: str,
        null: str | None,
        steps: Sequence[Missing],  # noqa: ARG003
    ) -> tuple[str, str | None]:
        where = graph.op("IsNaN", values) if null is None else null
        return graph.op("Cast", where, to=_FLOAT), None

    def describe(self) -> str:
        return "1 where it is null, else 0"


class FillMedian(FillOperator):
    """Nulls become the training split's median: the lower one of two, so that it is a value that occurs."""

    name = "fill_median"

    def fit(self, source: Source) -> Fit[FittedFillMedian]:
        (median,) = yield from source.distribution.quantiles([0.5])
        return FittedFillMedian(median)


@dataclass(frozen=True, slots=True)
class FittedFillMedian(Fill):
    why: ClassVar[str] = "median"


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


class FillMode(FillOperator):
    """Nulls become the most common value of the training split; of several, the smallest."""

    name = "fill_mode"

    def fit(self, source: Source) -> Fit[FittedFillMode]:
        table: ValueTable = yield NumberCounts(source.distribution.numbers)
        if len(table.values) == 0:  # all results of the steps are infinite
            return FittedFillMode(0.0)
        commonest = int(table.commonest_first()[0])
        return FittedFillMode(float(table.values[commonest].as_py()) + 0.0)


@dataclass(frozen=True, slots=True)
class FittedFillMode(Fill):
    why: ClassVar[str] = "commonest"


register_fitted("numeric", "missing", Missing)
register(FillMedian, FittedFillMedian)
register(FillMissing, FittedFillMissing)
register(FillMode, FittedFillMode)
