"""The section `data.checks`: what must hold for the rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from serin.spec.section import Duration, Section

_OF_A_COLUMN = (
    "type",
    "min",
    "max",
    "max_nulls",
    "unique",
    "values",
    "newest_within",
    "max_null_change",
    "max_shift",
)
_OF_THE_TABLE = ("min_rows", "max_rows", "max_row_change")


class CheckSpec(Section):
    """What must hold for one column, or without `column` for the whole table. A key that is not set checks nothing."""

    column: str | None = None
    """The column to check. Without it the check is about the number of rows."""
    type: Literal["string", "float", "int", "timestamp", "bool"] | None = None
    """The type that the column must have."""
    min: float | None = None
    """The smallest allowed value."""
    max: float | None = None
    """The largest allowed value."""
    max_nulls: float | None = Field(default=None, ge=0, le=1)
    """The largest allowed share of nulls."""
    unique: bool = False
    """No value may occur twice."""
    values: tuple[str | int, ...] | None = Field(default=None, min_length=1)
    """The allowed values."""
    newest_within: Duration | None = Field(default=None, gt=0)
    """The largest allowed age of the newest time in the column."""
    min_rows: int | None = Field(default=None, ge=0)
    """The smallest allowed number of rows."""
    max_rows: int | None = Field(default=None, ge=0)
    """The largest allowed number of rows."""
    max_row_change: float | None = Field(default=None, gt=0)
    """The largest allowed relative change of the number of rows against the previous dataset: 0.5 is half as many more
    or fewer."""
    max_null_change: float | None = Field(default=None, gt=0, le=1)
    """The largest allowed change of the share of nulls against the previous dataset."""
    max_shift: float | None = Field(default=None, gt=0, le=1)
    """The largest allowed distance between the distributions of this dataset and the previous one, from 0 to 1:
    Kolmogorov-Smirnov for numbers, total variation for categories."""
    otherwise: Literal["fail", "warn"] = "fail"
    """What a violation does: end the run, or only warn."""

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        here, other = (
            (_OF_A_COLUMN, _OF_THE_TABLE) if self.column is not None else (_OF_THE_TABLE, _OF_A_COLUMN)
        )
        wrong = [name for name in other if self._set(name)]
        if wrong and self.column is None:
            raise ValueError(f"{wrong[0]} needs a column: {{column: name, {wrong[0]}: ...}}")
        if wrong:
            raise ValueError(
                f"{wrong[0]} is about the whole table; put it into a separate check without `column`"
            )
        for low, high in (("min", "max"), ("min_rows", "max_rows")):
            lower, upper = getattr(self, low), getattr(self, high)
            if lower is not None and upper is not None and lower > upper:
                raise ValueError(f"{low} is {lower:g} and {high} is {upper:g}: no value is between them")
        if not any(self._set(name) for name in here):
            raise ValueError(f"a check needs {', '.join(here[:-1])} or {here[-1]}")
        return self

    def _set(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False

    def misfits(self, kind: str) -> Iterator[str]:
        """What cannot be checked of a column of this kind."""
        if (self.min is not None or self.max is not None) and kind in ("string", "timestamp"):
            yield f"column {self.column!r} is a {kind}; min and max need a number"
        if self.newest_within is not None and kind != "timestamp":
            yield f"newest_within needs a time, and {self.column!r} is a {kind}"
        texts = [isinstance(value, str) for value in self.values or ()]
        if texts and kind != "string" and (kind not in ("int", "bool") or any(texts)):
            yield f"column {self.column!r} is a {kind}; values must be all strings or all integers"

    @property
    def compares(self) -> bool:
        return any(
            getattr(self, name) is not None for name in ("max_row_change", "max_null_change", "max_shift")
        )
