"""What must hold for the rows; a check that does not hold ends the run or warns."""

from __future__ import annotations

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
    """One column, or without `column` the whole table. The last three compare with the dataset before this one."""

    column: str | None = None
    type: Literal["string", "float", "int", "timestamp", "bool"] | None = None
    min: float | None = None
    max: float | None = None
    max_nulls: float | None = Field(default=None, ge=0, le=1)
    unique: bool = False
    values: tuple[str | int, ...] | None = Field(default=None, min_length=1)
    newest_within: Duration | None = Field(default=None, gt=0)  # of now
    min_rows: int | None = Field(default=None, ge=0)
    max_rows: int | None = Field(default=None, ge=0)
    max_row_change: float | None = Field(default=None, gt=0)  # 0.5: half as many rows more or less
    max_null_change: float | None = Field(default=None, gt=0, le=1)  # of the share of nulls
    max_shift: float | None = Field(
        default=None, gt=0, le=1
    )  # share of rows that would have to move elsewhere
    otherwise: Literal["fail", "warn"] = "fail"

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
                f"{wrong[0]} is about the whole table; give it a check of its own, without `column`"
            )
        for low, high in (("min", "max"), ("min_rows", "max_rows")):
            lower, upper = getattr(self, low), getattr(self, high)
            if lower is not None and upper is not None and lower > upper:
                raise ValueError(f"{low} is {lower:g} and {high} is {upper:g}: nothing lies between them")
        if not any(self._set(name) for name in here):
            raise ValueError(f"a check needs {', '.join(here[:-1])} or {here[-1]}")
        return self

    def _set(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and value is not False

    @property
    def compares(self) -> bool:
        return any(
            getattr(self, name) is not None for name in ("max_row_change", "max_null_change", "max_shift")
        )
