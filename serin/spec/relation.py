"""How tables become one: joins (also as-of by time), rows taken once, and windows over the past."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from serin.spec.section import Duration, Section

Source = Literal["request", "lookup", "training_only"]
"""Where a column comes from at serving time: the client sends it, the bundle's table holds it, or nowhere."""

_CALL = re.compile(r"\s*(\w+)\s*\(\s*(?:(`[^`]+`|\w+)\s*(?:,\s*(\d+)\s*)?)?\)\s*")
FUNCTIONS = ("count", "sum", "mean", "min", "max", "lag")


def names(value: Any) -> Any:
    """One name may stand alone where a list is asked for."""
    return (value,) if isinstance(value, str) else value


class AsOfSpec(Section):
    """The newest row there that is not newer than the row here."""

    column: str  # the time here
    there: str | None = None  # the time there, when it is called otherwise
    within: Duration | None = Field(default=None, gt=0)  # an older partner counts as none
    strict: bool = False  # the partner must be older, not only as old

    @property
    def partner(self) -> str:
        return self.there or self.column


class JoinSpec(Section):
    table: str = Field(alias="with")
    on: tuple[str, ...] = ()
    as_of: AsOfSpec | None = None
    how: Literal["left", "inner"] = "left"
    columns: dict[str, str] = Field(min_length=1)  # column there -> name here
    source: Source = "request"

    @field_validator("on", mode="before")
    @classmethod
    def _one_key_may_stand_alone(cls, value: Any) -> Any:
        return names(value)

    @field_validator("as_of", mode="before")
    @classmethod
    def _one_time_may_stand_alone(cls, value: Any) -> Any:
        return {"column": value} if isinstance(value, str) else value

    @field_validator("columns", mode="before")
    @classmethod
    def _a_list_keeps_the_names(cls, value: Any) -> Any:
        return {name: name for name in value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _finds_rows_by_something(self) -> Self:
        if not self.on and self.as_of is None:
            raise ValueError("a join needs `on: [key, ...]`, `as_of: time`, or both")
        return self

    @model_validator(mode="after")
    def _a_lookup_can_be_served(self) -> Self:
        if self.source != "lookup":
            return self
        if self.as_of is not None:
            raise ValueError(
                "an as_of join cannot be source: lookup (the table would have to move on with the time); "
                "use source: request and let the client send the values, or training_only"
            )
        if len(self.on) != 1:
            raise ValueError(
                f"source: lookup takes one key column, not {list(self.on)}; "
                "use source: request and let the client send the values"
            )
        if self.how != "left":
            raise ValueError(
                "source: lookup needs how: left (a request whose key is unknown must still be answered)"
            )
        return self


class UniqueSpec(Section):
    """One row for each combination of `by`: the first or the last by data.time, else by position."""

    by: tuple[str, ...] = Field(min_length=1)
    keep: Literal["first", "last"] = "first"

    @field_validator("by", mode="before")
    @classmethod
    def _one_key_may_stand_alone(cls, value: Any) -> Any:
        return names(value)


@dataclass(frozen=True, slots=True)
class WindowColumn:
    """`back`: of a lag, how many rows."""

    function: str
    column: str | None
    back: int = 1


class WindowSpec(Section):
    """Columns made of earlier rows with the same key: strictly before the row's own time, never with it."""

    by: tuple[str, ...] = Field(min_length=1)
    rows: int | None = Field(default=None, ge=1)  # the last so many rows
    span: Duration | None = Field(default=None, gt=0)  # the rows of so much time
    delay: Duration = Field(default=0.0, ge=0)  # how long it takes until a row is known
    make: dict[str, str] = Field(
        min_length=1
    )  # name -> count(), sum(x), mean(x), min(x), max(x), lag(x[, rows])
    source: Literal["request", "training_only"] = "request"

    @field_validator("by", mode="before")
    @classmethod
    def _one_key_may_stand_alone(cls, value: Any) -> Any:
        return names(value)

    @field_validator("make")
    @classmethod
    def _calls_are_known(cls, make: dict[str, str]) -> dict[str, str]:
        for call in make.values():
            window_column(call)
        return make

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.rows is not None and self.span is not None:
            raise ValueError("a window has `rows` or `span`, not both (neither: all of the past)")
        return self

    @property
    def columns(self) -> dict[str, WindowColumn]:
        return {name: window_column(call) for name, call in self.make.items()}


def window_column(call: str) -> WindowColumn:
    """What a call such as mean(price) or lag(price, 2) asks for; ValueError with what is wrong."""
    match = _CALL.fullmatch(call)
    if match is None or match[1] not in FUNCTIONS:
        raise ValueError(f"{call!r} is none of count(), sum(x), mean(x), min(x), max(x), lag(x), lag(x, 2)")
    function, column, back = match.groups()
    if column is None and function != "count":
        raise ValueError(f"{call!r} names no column; write {function}(column)")
    if back is not None and (function != "lag" or int(back) < 1):
        raise ValueError(f"{call!r}: only lag takes a number of rows, 1 or more")
    return WindowColumn(function, column.strip("`") if column else None, int(back or 1))
