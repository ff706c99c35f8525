"""What a table seems to ask: the target's expression and its task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column
from serin.errors import TargetUnusable, nearest
from serin.etl.relational.target import MAX_CLASSES, evaluate_target
from serin.expressions import ExpressionError, parse
from serin.spec.target import TargetSpec

Task = Literal["binary", "multiclass", "regression"]
RARE = 0.05
"""A class with a smaller share of the rows is called rare."""
_NAMES = (
    "target", "label", "class", "y", "outcome", "churn", "churned", "default", "fraud", "is_fraud", "clicked",
)  # fmt: skip
_TRUE = {"yes", "y", "true", "t", "1", "positive", "good", "won", "bad", "churned", "fraud"}
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GuessedTarget:
    """`expressions`: by name; a single one has the empty name. `values` and `null`: the target of the rows that were
    looked at, with a column for each of several targets."""

    expressions: Mapping[str, str]
    task: Task
    why: str
    values: npt.NDArray[np.float32]
    null: npt.NDArray[np.bool_]
    classes: int = 0  # of a multiclass target

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the target reads."""
        texts = self.expressions.values()
        return tuple(dict.fromkeys(column for text in texts for column in parse(text).columns))

    @property
    def rare(self) -> str:
        """What is said about a single binary target with few rows of one class; empty when neither is rare."""
        if self.task != "binary" or len(self.expressions) > 1 or self.null.all():
            return ""
        share = float(self.values[~self.null].mean())
        if min(share, 1 - share) >= RARE:
            return ""
        which = "positive" if share < 0.5 else "negative"
        return f"only {min(share, 1 - share):.2%} of the rows are {which}"


def guess_target(columns: Mapping[str, Column], wanted: str | Sequence[str] | None) -> GuessedTarget:
    """The target the user named (a column or an expression, or several), or the one the table seems to have."""
    if wanted is None:
        name, reason = _likely(columns)
        return _of_column(name, columns, reason)
    if isinstance(wanted, str):
        return _named(columns, wanted)
    return _named(columns, wanted[0]) if len(wanted) == 1 else _several(columns, wanted)


def _several(columns: Mapping[str, Column], wanted: Sequence[str]) -> GuessedTarget:
    each = [_named(columns, text) for text in wanted]
    tasks = list(dict.fromkeys(target.task for target in each))
    if len(tasks) > 1 or tasks == ["multiclass"]:
        found = ", ".join(f"{text!r} is {target.task}" for text, target in zip(wanted, each, strict=True))
        reason = f"cannot be learnt together: {found}; several targets are all binary or all regression"
        raise TargetUnusable(expression=", ".join(wanted), reason=reason)
    names: dict[str, str] = {}
    for target in each:
        (text,) = target.expressions.values()
        stem = "_".join(re.findall(r"[A-Za-z0-9]+", text))[:36] or "target"
        names[stem if stem not in names else f"{stem}_{len(names)}"] = text
    return replace(
        each[0],
        expressions=names,
        why="the targets are those you asked for: " + "; ".join(target.why for target in each),
        values=np.stack([target.values for target in each], axis=1),
        null=np.logical_or.reduce([target.null for target in each]),
    )


def _named(columns: Mapping[str, Column], wanted: str) -> GuessedTarget:
    if wanted in columns:
        return _of_column(wanted, columns, "")
    try:
        expression = parse(wanted)
    except ExpressionError as error:
        reason = f"is neither a column nor an expression: {error}{nearest(wanted, columns)}"
        raise TargetUnusable(expression=wanted, reason=reason) from error
    missing = [name for name in expression.columns if name not in columns]
    if missing:
        reason = f"reads {missing[0]!r}, which is not a column{nearest(missing[0], columns)}"
        raise TargetUnusable(expression=wanted, reason=reason)
    if single_column(wanted) is not None:
        return _of_column(expression.columns[0], columns, "")
    try:
        return _made(wanted, "binary", f"the target is {wanted}, true or false", columns)
    except TargetUnusable:
        return _made(wanted, "regression", f"the target is {wanted}, a number", columns)


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
    learnable = [name for name, column in columns.items() if _can_be_learnt(column)]
    if not learnable:
        reason = "no column looks like one; name a column or an expression with --target"
        raise TargetUnusable(expression="target", reason=reason)
    last = learnable[-1] == [*columns][-1]
    return learnable[-1], f"it is the last column{'' if last else ' that is neither a time nor free text'}; "


def _can_be_learnt(column: Column) -> bool:
    distinct = len(np.unique(column.values[~column.null]))
    if column.kind == "timestamp" or distinct < 2:
        return False
    return column.kind != "string" or distinct <= min(MAX_CLASSES, 0.5 * len(column))


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
        return _of_text(name, quoted, column, columns, begin)
    values = _values(column)
    if column.kind == "int" and len(values) <= 20:
        return _made(quoted, "multiclass", f"{begin}it holds {len(values)} different integers", columns)
    return _made(quoted, "regression", f"{begin}it holds many different numbers", columns)


def _of_text(
    name: str, quoted: str, column: Column, columns: Mapping[str, Column], begin: str
) -> GuessedTarget:
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
    if len(seen) > MAX_CLASSES:
        example = max(seen)[1][:40]
        reason = (
            f"holds {len(seen):,} different texts, and at most {MAX_CLASSES:,} can be classes; compare it, such as "
            f"{quoted} == {example!r}, or name another column"
        )
        raise TargetUnusable(expression=name, reason=reason)
    return _made(quoted, "multiclass", f"{begin}it holds {len(seen)} different texts", columns)


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
    return GuessedTarget(
        expressions={"": expression},
        task=task,
        why=why,
        values=part.values,
        null=part.null,
        classes=len(part.classes or ()),
    )
