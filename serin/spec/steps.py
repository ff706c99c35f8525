"""The steps a feature may take, as the spec writes them. What they do is in serin/features, one file per step.

A chain begins with the raw column. Steps on numbers make numbers; some steps turn what they get into codes, or into
numbers of another kind. `follows` says what a step can work on, `gives` what it leaves to the next.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from serin.spec.step import Step

NUMBERS, VALUES, TIMES = ("float", "int", "bool"), ("string", "int", "bool"), ("timestamp",)


def _finite(value: float) -> float:
    if not math.isfinite(value) or abs(value) > 3.4028234663852886e38:
        raise ValueError(f"{value!r} is not a finite float32 number")
    return value


Finite = Annotated[float, AfterValidator(_finite)]


class NumberStep(Step):
    """A step from numbers to numbers."""

    kinds = NUMBERS
    follows = ("raw", "numbers")


class FillStep(NumberStep):
    """A step that replaces nulls."""

    indicator: bool = False
    """Also add a column `<name>_missing`: 1 where the value was null, 0 elsewhere."""


class FillMissing(FillStep):
    """Nulls become a given value."""

    name = "fill_missing"
    positional = "value"
    value: Finite = 0.0
    """The value that replaces nulls."""


class FillMedian(FillStep):
    """Nulls become the training split's median."""

    name = "fill_median"


class FillMode(FillStep):
    """Nulls become the most common value of the training split."""

    name = "fill_mode"


class Clip(NumberStep):
    """Limit values to fixed bounds (`min`, `max`) or to quantiles of the training split (`q`)."""

    name = "clip"
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
            _rising(self.q, "[0.001, 0.999]")
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError(f"min={self.min:g} must be below max={self.max:g}")
        return self


class Log1p(NumberStep):
    """The logarithm of 1 + |x|, with the sign of x."""

    name = "log1p"
    exact = False


class Normalize(NumberStep):
    """Mean 0 and standard deviation 1 on the training split. A null stays null: fill it first."""

    name = "normalize"


class MinMax(NumberStep):
    """0 for the training split's smallest value, 1 for its largest."""

    name = "min_max"


class RobustScale(NumberStep):
    """Subtract the median and divide by the distance between two quantiles of the training split."""

    name = "robust_scale"
    q: tuple[float, float] = (0.25, 0.75)
    """The two quantiles whose distance is the unit."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        _rising(self.q, "[0.25, 0.75]")
        return self


class Bucketize(Step):
    """Numbers become the codes of intervals between `edges`, or between that many `quantiles`; 0 is null."""

    name = "bucketize"
    kinds = NUMBERS
    follows = ("raw", "numbers")
    gives = "codes"
    positional = "edges"
    edges: tuple[Finite, ...] | None = Field(default=None, min_length=1)
    """The edges between the intervals, rising. An edge belongs to the interval above it."""
    quantiles: int | None = Field(default=None, ge=2, le=1024)
    """The number of intervals with equally many training rows."""

    @model_validator(mode="after")
    def _edges_rise(self) -> Self:
        if (self.edges is None) == (self.quantiles is None):
            raise ValueError("give either edges: [1, 10, 100] or quantiles: 10")
        if self.edges is not None and list(self.edges) != sorted(set(self.edges)):
            raise ValueError(f"edges={list(self.edges)} must rise")
        return self


class Categorify(Step):
    """Codes: 0 null, then `buckets` codes for what is out of vocabulary, then the vocabulary by descending count."""

    name = "categorify"
    kinds = VALUES
    gives = "codes"
    min_count: int = Field(default=1, ge=1)
    """The number of training rows that a value needs to be in the vocabulary."""
    max_size: int | None = Field(default=None, ge=1)
    """The largest size of the vocabulary. By default no limit."""
    buckets: int = Field(default=1, ge=1)
    """The number of codes that values outside the vocabulary share, by their hash."""
    joint: bool = False
    """Use one vocabulary for all columns of the feature."""


class HashBucket(Step):
    """One of `buckets` codes, by the hash of the value; 0 is null."""

    name = "hash_bucket"
    kinds = VALUES
    gives = "codes"
    positional = "buckets"
    buckets: int = Field(ge=1, le=2**31 - 2)
    """The number of codes."""


class Ordinal(Step):
    """The position of the value in `order`, or among the sorted values of the training split. Other values are null."""

    name = "ordinal"
    kinds = VALUES
    positional = "order"
    order: tuple[str | int, ...] | None = Field(default=None, min_length=1)
    """The values in their order. By default the sorted values of the training split."""

    @field_validator("order")
    @classmethod
    def _names_each_once(cls, order: tuple[str | int, ...] | None) -> tuple[str | int, ...] | None:
        if order is not None and len(set(order)) < len(order):
            raise ValueError("a value stands twice in `order`")
        if order is not None and len({type(value) for value in order}) > 1:
            raise ValueError("`order` mixes text and numbers; put the numbers into quotes, or none")
        return order


class OneHot(Step):
    """A column of 0 and 1 for each code, or for each value as categorify would code it; null is 0 in all."""

    name = "one_hot"
    kinds = VALUES
    follows = ("raw", "codes")
    gives = "end"
    buckets: ClassVar[int] = 1
    min_count: int = Field(default=1, ge=1)
    """The number of training rows that a value needs to get its own column."""
    max_size: int | None = Field(default=64, ge=1)
    """The largest number of values with their own column. `null` sets no limit."""

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}=",)


class CountEncode(Step):
    """The number of training rows that have the value."""

    name = "count_encode"
    kinds = VALUES

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}_count",)


class TargetEncode(Step):
    """The mean target of the training rows with the value, as if `smoothing` more rows had the mean of all."""

    name = "target_encode"
    kinds = VALUES
    folds: int = Field(default=5, ge=2, le=64)
    """The number of folds. A training row is encoded from the rows of the other folds, to avoid leaking its target."""
    smoothing: float = Field(default=20.0, ge=0, allow_inf_nan=False)
    """The number of rows with the overall mean that are added to each value's rows."""

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}_target",)


Stat = Literal["mean", "std", "min", "max", "sum", "count"]


class GroupStats(Step):
    """Statistics of the column among the training rows with the same value in the column `by`."""

    name = "group_stats"
    kinds = NUMBERS
    follows = ("raw", "numbers")
    by: str
    """The key column. Clients send it instead of the column itself."""
    stats: tuple[Stat, ...] = Field(default=("mean",), min_length=1)
    """The statistics, one feature each."""

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}_{stat}_by_{self.by}" for stat in self.stats)


Part = Literal["minute", "hour", "weekday", "day", "month", "quarter"]


class DateParts(Step):
    """Parts of a time (UTC) as categories; 0 is null."""

    name = "date_parts"
    kinds = TIMES
    gives = "codes"
    positional = "parts"
    parts: tuple[Part, ...] = Field(default=("hour", "weekday"), min_length=1)
    """The parts, one feature each. Monday is weekday 1."""

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}_{part}" for part in self.parts)


class Cyclical(Step):
    """Sine and cosine of `parts` of a time (UTC), or of a number with a `period`."""

    name = "cyclical"
    kinds = (*TIMES, *NUMBERS)
    follows = ("raw", "numbers")
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

    def accepted(self) -> tuple[str, ...]:
        return NUMBERS if self.parts is None else TIMES

    def names(self, name: str) -> tuple[str, ...]:
        bases = [name] if self.parts is None else [f"{name}_{part}" for part in self.parts]
        return tuple(f"{base}_{axis}" for base in bases for axis in ("sin", "cos"))


def _rising(q: tuple[float, float], example: str) -> None:
    if not 0 <= q[0] < q[1] <= 1:
        raise ValueError(f"q={list(q)} must be two rising numbers between 0 and 1, such as {example}")
