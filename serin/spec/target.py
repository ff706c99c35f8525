"""The section `data.target`: what the model predicts."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from serin.expressions import ExpressionError, parse
from serin.spec.section import NAMES, Section, is_empty

_TARGET_NAME = re.compile(r"[A-Za-z0-9_]{1,40}")


def checked_expression(text: str) -> str:
    try:
        parsed = parse(text)
    except ExpressionError as error:
        raise ValueError(str(error)) from error
    if not parsed.columns:
        raise ValueError(f"{text!r} reads no column")
    return text


def _named(column: str) -> str:
    """An expression that is this column."""
    try:
        plain = parse(column).columns == (column,)
    except ExpressionError:
        plain = False
    return column if plain else f"`{column}`"


def _with_column(schema: dict[str, Any]) -> None:
    """The key `column`, which is an expression once it is read."""
    text = "The column of a single target, instead of `expression`; any name, without quotes."
    column = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "description": text}
    schema["properties"] = {"column": column, **schema["properties"]}
    schema["required"] = ["task"]


class TargetSpec(Section):
    """What the model predicts: one target (`column` or `expression`), or several of the same task (`expressions`). With
    several, `score` has a column for each."""

    model_config = ConfigDict(json_schema_extra=_with_column)

    expressions: dict[str, str] | None = Field(default=None, min_length=2)
    """Several targets of the same task: name -> expression."""
    expression: str
    """The expression of a single target, such as `arr_delay > 15`. Rows for which it is null are left out."""
    task: Literal["binary", "multiclass", "regression"]
    """What kind of value is predicted."""
    known_at_serving: Annotated[tuple[str, ...], NAMES] = Field(default=(), exclude_if=is_empty)
    """Columns that the target reads although clients know them when they ask, such as `promised` in
    `delivered > promised`: they may be features. The leak check looks at them also without `data.time`. A single name
    needs no list."""

    @model_validator(mode="before")
    @classmethod
    def _a_column_is_an_expression(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("column") is None:
            return given
        rest = {key: value for key, value in given.items() if key != "column"}
        if rest.get("expression") is not None or rest.get("expressions") is not None:
            raise ValueError("give one of column, expression and expressions")
        return {**rest, "expression": _named(str(given["column"]))}

    @model_validator(mode="before")
    @classmethod
    def _tell_all(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("expressions"), dict):
            text = "; ".join(f"{name}: {each}" for name, each in given["expressions"].items())
            if given.get("expression") not in (None, text):
                raise ValueError("give expression for one target or expressions for several, not both")
            return {**given, "expression": text}
        return given

    @field_validator("expressions")
    @classmethod
    def _parse_each(cls, texts: dict[str, str] | None) -> dict[str, str] | None:
        for name, text in (texts or {}).items():
            checked_expression(text)
            if not _TARGET_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a valid target name: use letters, digits and '_', at most 40"
                )
        return texts

    @field_validator("expression")
    @classmethod
    def _parse_one(cls, text: str, others: ValidationInfo) -> str:
        several = others.data.get("expressions", "refused") is not None
        return text if several else checked_expression(text)

    @model_validator(mode="after")
    def _one_task(self) -> Self:
        if self.expressions is not None and self.task == "multiclass":
            raise ValueError(
                "several targets are all binary or all regression; train a model for each multiclass one"
            )
        return self

    @property
    def each(self) -> dict[str, str]:
        """The expressions by name. A single one has the empty name."""
        return {"": self.expression} if self.expressions is None else self.expressions

    @property
    def names(self) -> tuple[str, ...]:
        """The names of several targets; empty for a single one."""
        return () if self.expressions is None else tuple(self.expressions)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(column for text in self.each.values() for column in parse(text).columns))
