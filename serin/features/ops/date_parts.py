"""Parts of a time (UTC) as codes of fixed size, by integer arithmetic on microseconds; 0 is null.

Periodic values also as points on a circle: sine and cosine, so that the end is next to the beginning. They are parts of
a time, or a number with a period. In float64, stored as float32 (class B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from serin.columns.column import Column, array_module
from serin.features.aggregates.aggregate import Fit, ready
from serin.features.fitted import Codes, Floats, Sample, StoredFields
from serin.features.numbers import Numbers
from serin.features.operator import Operator, Source, register
from serin.formats.dataset import CategoricalColumn
from serin.formats.schema import INT64_NULL, Kind
from serin.spec.steps.step import NUMBERS, TIMES, Made

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


Part = Literal["minute", "hour", "weekday", "day", "month", "quarter"]
PART_SIZES: Mapping[str, int] = {"minute": 60, "hour": 24, "weekday": 7, "day": 31, "month": 12, "quarter": 4}
_FLOAT, _DOUBLE = 1, 11  # onnx.TensorProto
_MINUTE, _HOUR, _DAY = 60_000_000, 3_600_000_000, 86_400_000_000
_BLOCK = 2**14  # rows that stay in the processor's cache from one operation to the next
_WIDEST = 2**18  # hours or minutes that a table is made for
# Some 146,000 years before 1970: earlier times count as this, so that nothing overflows.
_EARLIEST = -(2**62)


class DateParts(Operator):
    """Parts of a time (UTC) as categories; 0 is null."""

    name = "date_parts"
    kinds = TIMES
    gives = "codes"
    positional = "parts"
    parts: tuple[Part, ...] = Field(default=("hour", "weekday"), min_length=1)
    """The parts, one feature each. Monday is weekday 1."""

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}_{part}" for part in self.parts)

    def fit(self, source: Source) -> Fit[FittedDateParts]:
        del source
        return ready(FittedDateParts(self.parts))


@dataclass(frozen=True, slots=True)
class FittedDateParts(StoredFields):
    parts: tuple[str, ...]

    def outputs(self, column: str) -> tuple[CategoricalColumn, ...]:
        return tuple(
            CategoricalColumn(name=f"{column}_{part}", size=1 + PART_SIZES[part]) for part in self.parts
        )

    def labels(self) -> tuple[tuple[str, ...], ...]:
        """Hours and minutes count from 0, weekdays (1 is Monday) and parts of the calendar from 1."""
        first = {"minute": 0, "hour": 0}
        return tuple(
            ("null", *(str(first.get(part, 1) + place) for place in range(PART_SIZES[part])))
            for part in self.parts
        )

    def transform(self, column: Column) -> tuple[Codes, ...]:
        xp = array_module(column.values)
        if xp is np:
            return self._on_host(column)
        null = column.null
        times = xp.maximum(xp.where(null, 0, column.values), _EARLIEST)
        return tuple(xp.where(null, 0, part_code(part, times)).astype(np.int32) for part in self.parts)

    def _on_host(self, column: Column) -> tuple[Codes, ...]:
        """The same codes, from a table with an entry per hour (or minute) where the times are from a narrow range."""
        values = column.values
        unit = _MINUTE if "minute" in self.parts else _HOUR
        first, last = (int(values.min()) // unit, int(values.max()) // unit) if len(values) else (0, 0)
        early = first * unit <= _EARLIEST  # so is a null
        if early or last - first >= min(_WIDEST, len(values)):
            return self._in_blocks(column)
        entries = np.arange(first, last + 1) * unit
        tables = [part_code(part, entries).astype(np.int32) for part in self.parts]
        if _in_order(values):  # as most tables are: each entry's rows are contiguous
            counts = np.diff(np.searchsorted(values, entries), append=len(values))
            return tuple(np.repeat(table, counts) for table in tables)
        made = tuple(np.empty(len(values), np.int32) for _ in self.parts)
        for start in range(0, len(values), _BLOCK):
            places = (values[start : start + _BLOCK] - first * unit) // unit
            for table, codes in zip(tables, made, strict=True):
                np.take(table, places, out=codes[start : start + _BLOCK], mode="clip")
        return made

    def _in_blocks(self, column: Column) -> tuple[Codes, ...]:
        """Computes block by block, and from hours in 32 bits where these are enough."""
        made = tuple(np.empty(len(column), np.int32) for _ in self.parts)
        start = 0
        for block in column.blocks(_BLOCK):
            null = block.null
            times = np.maximum(np.where(null, 0, block.values), _EARLIEST)
            hours = times // _HOUR
            narrow = hours.astype(np.int32) if int(hours.max()) < 2**31 else hours
            days = narrow // 24
            for part, codes in zip(self.parts, made, strict=True):
                if part == "minute":
                    code = part_code(part, times)
                else:
                    code = narrow - days * 24 + 1 if part == "hour" else _code_of_days(part, days)
                codes[start : start + len(block)] = np.where(null, 0, code)
            start += len(block)
        return made

    def to_onnx(self, graph: GraphBuilder, values: str, kind: Kind) -> tuple[str, ...]:  # noqa: ARG002
        from serin.columns.onnx_graph import Whole  # onnx is loaded only where a graph is built

        zero = graph.constant(np.int64(0), "zero")
        null = graph.op("Equal", values, graph.constant(np.int64(INT64_NULL), "null"))
        present = graph.op("Where", null, zero, values)
        times = Whole(graph, graph.op("Max", present, graph.constant(np.int64(_EARLIEST), "earliest")))
        return tuple(graph.op("Where", null, zero, part_code(part, times).name) for part in self.parts)

    def describe(self) -> str:
        return ", ".join(self.parts) + " (UTC)"


def _in_order(values: npt.NDArray[np.int64]) -> bool:
    few = values[:_BLOCK]
    return not (few[1:] < few[:-1]).any() and not (values[1:] < values[:-1]).any()


def part_code(part: str, times: Any) -> Any:
    """1 .. size of the part for times in microseconds since 1970: for arrays and for a graph's tensors alike."""
    if part == "minute":
        return times // _MINUTE % 60 + 1
    if part == "hour":
        return times // _HOUR % 24 + 1
    return _code_of_days(part, times // _DAY)


def _code_of_days(part: str, days: Any) -> Any:
    if part == "weekday":  # 1 is Monday; 1970 began on a Thursday
        return (days + 3) % 7 + 1
    day, month = _civil(days)
    if part == "day":
        return day
    if part == "month":
        return month
    assert part == "quarter", part
    return (month - 1) // 3 + 1


def _civil(days: Any) -> tuple[Any, Any]:
    """Day of the month and month, in the proleptic Gregorian calendar, counted in eras of 400 years from 0000-03-01."""
    day_of_era = (days + 719_468) % 146_097
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (year_of_era * 365 + year_of_era // 4 - year_of_era // 100)
    month_from_march = (day_of_year * 5 + 2) // 153
    day = day_of_year - (month_from_march * 153 + 2) // 5 + 1
    return day, (month_from_march + 2) % 12 + 1


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


register(DateParts, FittedDateParts)
register(Cyclical, FittedCyclical, also={"cyclical_parts": FittedCyclicalParts})
