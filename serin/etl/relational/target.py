"""The target: the spec's expression over the rows, and what its task asks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.columns.column import Column, any_true, array_module, beside
from serin.columns.derived import beside_columns, evaluate_columns, typed
from serin.errors import TargetUnusable
from serin.etl.binding.uses import text_target
from serin.expressions import ExpressionError, Masked
from serin.spec.target import TargetSpec

MAX_CLASSES = 1000

Array = npt.NDArray[Any]
Class = str | int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetPart:
    """A piece's target: float32 values; for multiclass, positions in the piece's own `classes`."""

    values: Array
    null: npt.NDArray[np.bool_]
    classes: tuple[Class, ...] | None = None

    def __getitem__(self, rows: Any) -> TargetPart:
        return TargetPart(values=self.values[rows], null=self.null[rows], classes=self.classes)

    def coded(self, classes: Sequence[Class]) -> npt.NDArray[np.float32]:
        """The values a network learns: for multiclass, positions in the dataset's classes."""
        if self.classes is None:
            return self.values.astype(np.float32, copy=False)
        place = {each: index for index, each in enumerate(classes)}
        table = np.asarray([place.get(each, -1) for each in self.classes], np.float32)
        coded: npt.NDArray[np.float32] = beside(table, self.values)[self.values]
        return coded


def evaluate_target(target: TargetSpec, columns: Mapping[str, Column], rows: int) -> TargetPart:
    """The target of a piece's rows; TargetUnusable when an expression gives what the task cannot learn.

    Of several targets the values have a column for each, and a row without one of them has none.
    """
    if not target.names:
        return _evaluate(target, columns, rows)
    parts = [
        _evaluate(TargetSpec(expression=text, task=target.task), columns, rows)
        for text in target.each.values()
    ]
    xp = array_module(*(part.values for part in parts))
    null = reduce(or_, [part.null for part in parts])
    return TargetPart(values=xp.stack([part.values for part in parts], axis=1), null=null)


def first_target(values: Array) -> Array:
    """The one that is shown where only one can be."""
    return values if values.ndim == 1 else values[:, 0]


def _evaluate(target: TargetSpec, columns: Mapping[str, Column], rows: int) -> TargetPart:
    try:
        expression = typed(target.expression, {name: columns[name].kind for name in target.columns})
        result = evaluate_columns(expression, columns, rows)
        if target.task == "multiclass":
            part = _classes(result)
            values, null = (beside_columns(each, columns) for each in (part.values, part.null))
            return TargetPart(values=values, null=null, classes=part.classes)
    except ExpressionError as error:
        raise TargetUnusable(expression=target.expression, reason=f"cannot be computed: {error}") from error
    text = result.values.dtype.kind in "USOT"
    if text:
        raise text_target(target.expression, target.task)
    if result.values.dtype == bool:
        return TargetPart(values=(result.values & ~result.null).astype(np.float32), null=result.null)
    values = result.values.astype(np.float64)
    null = result.null | ~np.isfinite(values)
    if target.task == "binary":
        other = ~null & (values != 0) & (values != 1)
        if any_true(other):
            first = float(values[other][0])
            raise TargetUnusable(
                expression=target.expression,
                reason=f"gives {first:g}, and task: binary needs true and false; compare it with a number, "
                "or use task: regression",
            )
    return TargetPart(values=np.where(null, 0, values).astype(np.float32), null=null)


def check_classes(target: TargetSpec, counts: npt.NDArray[np.int64], classes: Sequence[Class]) -> None:
    """TargetUnusable when the training rows have one class only. `counts`: training rows per class."""
    if target.names:
        for text, own in zip(target.each.values(), counts, strict=True):
            check_classes(TargetSpec(expression=text, task=target.task), own, classes)
        return
    present = np.flatnonzero(counts)
    if target.task == "regression" or len(present) > 1:
        return
    names = classes or ("false", "true")
    raise TargetUnusable(
        expression=target.expression,
        reason=f"has one class only ({names[int(present[0])]}) in the training rows: there is nothing to learn; change "
        "the expression or the split",
    )


def check_varies(target: TargetSpec, ends: npt.NDArray[np.float32]) -> None:
    """TargetUnusable when a regression's target is the same number in all training rows. `ends`: the least and the
    largest, [2, targets]."""
    texts = list(target.each.values()) if target.names else [target.expression]
    for text, low, high in zip(texts, *ends, strict=True):
        if low == high:
            raise TargetUnusable(
                expression=text,
                reason=f"is {low:g} in every training row: there is nothing to learn; change the expression or the "
                "split",
            )


def merge_classes(target: TargetSpec, parts: Sequence[Sequence[Class]]) -> tuple[Class, ...]:
    """All classes of a multiclass target, in order of value."""
    seen: set[Class] = set()
    for part in parts:
        seen.update(part)
    if len(seen) > MAX_CLASSES:
        raise TargetUnusable(
            expression=target.expression,
            reason=f"has {len(seen):,} different values; at most {MAX_CLASSES} can be classes. Is it task: regression?",
        )
    return tuple(sorted(seen))  # all strings, or all integers


def _classes(result: Masked) -> TargetPart:
    present = result.values[~result.null]
    if result.values.dtype.kind == "f":
        whole = present.astype(np.int64)
        if any_true(whole != present):
            raise ExpressionError("classes must be strings or integers, not floats")
        present = whole
    elif result.values.dtype.kind == "b":
        present = present.astype(np.int64)
    xp = array_module(present)
    if xp is np:
        encoded = pa.array(present).dictionary_encode()
        classes, places = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    else:
        distinct, places = xp.unique(present, return_inverse=True)
        classes = distinct.get().tolist()
    values = xp.zeros(len(result.values), np.int64)
    values[~result.null] = places
    return TargetPart(values=values, null=result.null, classes=tuple(classes))
