"""What a table seems to ask: the target's expression and its task."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column
from serin.errors import TargetUnusable, nearest
from serin.etl.relational.target import evaluate_target
from serin.expressions import ExpressionError, parse
from serin.spec.target import TargetSpec

Task = Literal["binary", "multiclass", "regression"]
_NAMES = (
    "target",
    "label",
    "class",
    "y",
    "outcome",
    "churn",
    "churned",
    "default",
    "fraud",
    "is_fraud",
    "clicked",
)
_TRUE = {"yes", "y", "true", "t", "1", "positive", "good", "won", "bad", "churned", "fraud"}
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GuessedTarget:
    """`values` and `null`: the target of the rows that were looked at."""

    expression: str
    task: Task
    why: str
    values: npt.NDArray[np.float32]
    null: npt.NDArray[np.bool_]


def guess_target(columns: Mapping[str, Column], wanted: str | None) -> GuessedTarget:
    """The target the user named (a column or an expression), or the one the table seems to have."""
    if wanted is None:
        name, reason = _likely(columns)
        return _of_column(name, columns, reason)
    if wanted in columns:
        return _of_column(wanted, columns, "")
    try:
        expression = parse(wanted)
    except ExpressionError as error:
        raise TargetUnusable(expression=wanted, reason=f"is no column and no expression: {error}") from error
    missing = [name for name in expression.columns if name not in columns]
    if missing:
        raise TargetUnusable(
            expression=wanted, reason=f"reads {missing[0]!r}, no column{nearest(missing[0], columns)}"
        )
    if single_column(wanted) is not None:
        return _of_column(expression.columns[0], columns, "")
    try:
        return _made(wanted, "binary", "the target is what you asked for, true or false", columns)
    except TargetUnusable:
        return _made(wanted, "regression", "the target is what you asked for, a number", columns)


def single_column(expression: str) -> str | None:
    """The column, when the expression is nothing else."""
    root = parse(expression).root
    return str(root.value) if root.kind == "column" else None


def _likely(columns: Mapping[str, Column]) -> tuple[str, str]:
    for name in _NAMES:
        for column_name in columns:
            if column_name.lower() == name:
                return column_name, "its name says so; "
    for name, column in columns.items():
        if column.kind == "bool" or (column.kind == "int" and _values(column) == {0, 1}):
            return name, "it is the first column of yes and no; "
    return list(columns)[-1], "it is the last column; "


def _of_column(name: str, columns: Mapping[str, Column], reason: str) -> GuessedTarget:
    column = columns[name]
    quoted = name if _PLAIN.fullmatch(name) and single_word(name) else f"`{name}`"
    begin = f"{name} is the target: {reason}"
    if column.kind == "timestamp":
        raise TargetUnusable(
            expression=name, reason="is a time; name another column, or an expression over one"
        )
    if column.kind == "bool" or (column.kind != "string" and _values(column) <= {0, 1}):
        return _made(quoted, "binary", f"{begin}it holds yes and no", columns)
    if column.kind == "string":
        assert column.dictionary is not None
        counts = np.bincount(column.values[~column.null], minlength=len(column.dictionary))
        seen = [
            (int(counts[place]), text)
            for place, text in enumerate(column.dictionary.to_pylist())
            if counts[place]
        ]
        if len(seen) == 2:
            positive = next((text for _, text in seen if text.lower() in _TRUE), min(seen)[1])
            text = positive.replace("\\", "\\\\").replace("'", "\\'")
            return _made(f"{quoted} == '{text}'", "binary", f"{begin}it holds two texts", columns)
        return _made(quoted, "multiclass", f"{begin}it holds {len(seen)} different texts", columns)
    values = _values(column)
    if column.kind == "int" and len(values) <= 20:
        return _made(quoted, "multiclass", f"{begin}it holds {len(values)} different whole numbers", columns)
    return _made(quoted, "regression", f"{begin}it holds many different numbers", columns)


def single_word(name: str) -> bool:
    """Whether an expression reads this name as a column and not as one of its own words."""
    try:
        return single_column(name) == name
    except ExpressionError:
        return False


def _values(column: Column) -> set[float]:
    return set(np.unique(column.values[~column.null])[:100].tolist())


def _made(expression: str, task: Task, why: str, columns: Mapping[str, Column]) -> GuessedTarget:
    rows = len(next(iter(columns.values())))
    part = evaluate_target(TargetSpec(expression=expression, task=task), columns, rows)
    return GuessedTarget(expression=expression, task=task, why=why, values=part.values, null=part.null)
