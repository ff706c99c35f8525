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
        raise ValueError(f"{value!r} is no finite float32 number")
    return value


Finite = Annotated[float, AfterValidator(_finite)]


class NumberStep(Step):
    kinds = NUMBERS
    follows = ("raw", "numbers")


class FillStep(NumberStep):
    indicator: bool = False  # also a column `<name>_missing`: 1 where it was null, else 0


class FillMissing(FillStep):
    """Nulls become a given value."""

    name = "fill_missing"
    positional = "value"
    value: Finite = 0.0


class FillMedian(FillStep):
    """Nulls become the training split's median."""

    name = "fill_median"


class FillMode(FillStep):
    """Nulls become the training split's commonest value."""

    name = "fill_mode"


class Clip(NumberStep):
    """Values are kept within fixed bounds (`min`, `max`) or within quantiles of the training split (`q`)."""

    name = "clip"
    min: Finite | None = None
    max: Finite | None = None
    q: tuple[float, float] | None = None

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
    """Minus the median, divided by the distance between two quantiles of the training split."""

    name = "robust_scale"
    q: tuple[float, float] = (0.25, 0.75)

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
    quantiles: int | None = Field(default=None, ge=2, le=1024)

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
    max_size: int | None = Field(default=None, ge=1)
    buckets: int = Field(default=1, ge=1)
    joint: bool = False  # one vocabulary for all columns of the feature


class HashBucket(Step):
    """One of so many codes, by the value's hash; 0 is null."""

    name = "hash_bucket"
    kinds = VALUES
    gives = "codes"
    positional = "buckets"
    buckets: int = Field(ge=1, le=2**31 - 2)


class Ordinal(Step):
    """The value's place in `order`, or among the training split's values in ascending order; others are null."""

    name = "ordinal"
    kinds = VALUES
    positional = "order"
    order: tuple[str | int, ...] | None = Field(default=None, min_length=1)

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
    max_size: int | None = Field(default=64, ge=1)

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}=",)


class CountEncode(Step):
    """How many training rows have the value."""

    name = "count_encode"
    kinds = VALUES

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}_count",)


class TargetEncode(Step):
    """The mean target of the training rows with the value, as if `smoothing` more rows had the mean of all."""

    name = "target_encode"
    kinds = VALUES
    folds: int = Field(default=5, ge=2, le=64)
    smoothing: float = Field(default=20.0, ge=0, allow_inf_nan=False)

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}_target",)


Stat = Literal["mean", "std", "min", "max", "sum", "count"]


class GroupStats(Step):
    """Statistics of the column among the training rows with the same value in the column `by`."""

    name = "group_stats"
    kinds = NUMBERS
    follows = ("raw", "numbers")
    by: str
    stats: tuple[Stat, ...] = Field(default=("mean",), min_length=1)

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

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}_{part}" for part in self.parts)


class Cyclical(Step):
    """Sine and cosine of `parts` of a time (UTC), or of a number that comes round after a `period`."""

    name = "cyclical"
    kinds = (*TIMES, *NUMBERS)
    follows = ("raw", "numbers")
    gives = "end"
    exact = False
    positional = "parts"
    parts: tuple[Part, ...] | None = Field(default=None, min_length=1)
    period: float | None = Field(default=None, gt=0, allow_inf_nan=False)

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
