"""Which tables, how they are joined, what is predicted, how rows are split, what must hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from serin.expressions import ExpressionError, parse
from serin.spec.section import Section

Source = Literal["request", "lookup", "training_only"]
"""Where a column comes from at serving time: the client sends it, the bundle's table holds it, or nowhere."""


class JoinSpec(Section):
    table: str = Field(alias="with")
    on: tuple[str, ...] = Field(min_length=1)
    how: Literal["left", "inner"] = "left"
    columns: dict[str, str] = Field(min_length=1)  # column there -> name here
    source: Source = "request"

    @field_validator("on", mode="before")
    @classmethod
    def _one_key_may_stand_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("columns", mode="before")
    @classmethod
    def _a_list_keeps_the_names(cls, value: Any) -> Any:
        return {name: name for name in value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _a_lookup_can_be_served(self) -> Self:
        if self.source == "lookup" and len(self.on) != 1:
            raise ValueError(
                f"source: lookup takes one key column, not {list(self.on)}; "
                "use source: request and let the client send the values"
            )
        if self.source == "lookup" and self.how != "left":
            raise ValueError(
                "source: lookup needs how: left (a request whose key is unknown must still be answered)"
            )
        return self


class TargetSpec(Section):
    expression: str
    task: Literal["binary", "multiclass", "regression"]

    @field_validator("expression")
    @classmethod
    def _parses(cls, text: str) -> str:
        try:
            parse(text)
        except ExpressionError as error:
            raise ValueError(str(error)) from error
        return text

    @property
    def columns(self) -> tuple[str, ...]:
        return parse(self.expression).columns


class SplitSpec(Section):
    train: float = Field(default=0.8, gt=0, lt=1)
    valid: float = Field(default=0.1, gt=0, lt=1)
    test: float = Field(default=0.1, gt=0, lt=1)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        total = self.train + self.valid + self.test
        if abs(total - 1) > 1e-9:
            raise ValueError(f"train + valid + test = {total:g}; they must add up to 1")
        return self


class CheckSpec(Section):
    column: str
    min: float | None = None
    max: float | None = None
    max_nulls: float | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if self.min is None and self.max is None and self.max_nulls is None:
            raise ValueError("a check needs min, max or max_nulls")
        return self


class DataSpec(Section):
    """The first table is the main one: its rows are the rows of the dataset."""

    tables: dict[str, str] = Field(min_length=1)
    joins: tuple[JoinSpec, ...] = ()
    target: TargetSpec
    time: str | None = None
    split: SplitSpec = SplitSpec()
    checks: tuple[CheckSpec, ...] = ()
    training_only: tuple[str, ...] = ()  # columns of the main table that are not known when a request is made

    @property
    def main(self) -> str:
        return next(iter(self.tables))

    def source_of(self, column: str) -> Source:
        """Where `column` comes from at serving time."""
        if column in self.training_only or column in self.target.columns:
            return "training_only"
        for join in self.joins:
            if column in join.columns.values():
                return join.source
        return "request"

    def problems(self) -> Iterator[tuple[str, str]]:
        """What does not fit together inside this section, as (key, what and how to mend it)."""
        seen = {self.main}
        made: dict[str, str] = {}
        for index, join in enumerate(self.joins):
            key = f"data.joins[{index}]"
            if join.table not in self.tables:
                yield f"{key}.with", f"no table {join.table!r} in data.tables; name it there first"
            elif join.table in seen:
                yield f"{key}.with", f"table {join.table!r} is the main table or joined already"
            seen.add(join.table)
            for name in join.columns.values():
                if name in made:
                    yield (
                        f"{key}.columns",
                        f"{name!r} comes from {made[name]!r} too; rename it: {{there: here}}",
                    )
                made[name] = join.table
            if join.source == "lookup" and self.source_of(join.on[0]) != "request":
                source = self.source_of(join.on[0])
                yield f"{key}.on", f"{join.on[0]!r} is {source}; a lookup's key must come with the request"
        for table in self.tables:
            if table not in seen:
                yield f"data.tables.{table}", "is never joined; take it out or join it"
