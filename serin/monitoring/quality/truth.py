"""The truth in a label table: the finished target, or computed from the raw columns that the spec's target reads.

A binary truth is 0 or 1 and a regression's a number; a class is kept as text, since its number may differ between
versions. A row without a value is missing: it is left out and counted, and never takes back an earlier label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Column, column_from_arrow, kind_of_type
from serin.columns.derived import COMPARISONS, Typed, derive, evaluate_columns, typed
from serin.errors import LabelsUnfit, nearest
from serin.expressions import ExpressionError, Masked, Node, parse
from serin.formats.nulls import without_null_strings
from serin.formats.schema import Kind, Schema
from serin.spec.data import DataSpec

FINISHED = ("_label", "target", "label")
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthOf:
    """What a version predicts: what its labels must be."""

    model: str
    data: DataSpec
    schema: Schema

    @property
    def expression(self) -> str:
        return self.data.target.expression

    @property
    def text(self) -> bool:
        """Whether a truth is the name of a class."""
        return self.schema.task == "multiclass"


def read_truth(
    table: pa.Table, of: TruthOf, value: str | None = None
) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """Returns the truth of each row and which rows have one. `value`: the column with the finished target; None: a
    column that is called like one and not like an answer, else the raw columns of the target's expression. Several
    targets give lists."""
    names = of.schema.targets
    if names:
        if value is not None:
            raise LabelsUnfit(
                model=of.model,
                column=value,
                reason=f"cannot hold the targets {', '.join(names)}; give a column each",
            )
        return _several(table, of)
    answers = {
        output.name for output in of.schema.outputs
    }  # a file of scores has them: they are not the truth
    usual = (name for name in FINISHED if name in table.column_names and name not in answers)
    chosen = value or next(usual, None)
    if chosen is not None:
        if chosen not in table.column_names:
            raise LabelsUnfit(
                model=of.model, column=chosen, reason=f"is missing{nearest(chosen, table.column_names)}"
            )
        return _finished(_known(table, chosen, of, of.expression), chosen, of)
    return _computed(table, of.expression, of)


def _several(table: pa.Table, of: TruthOf) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    parts = [
        _finished(_known(table, name, of, text), name, of)
        if name in table.column_names
        else _computed(table, text, of)
        for name, text in of.data.target.each.items()
    ]
    known = np.logical_and.reduce([known for _, known in parts])
    values = np.stack([np.asarray(each.fill_null(0.0)) for each, _ in parts], axis=1)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), len(parts)), known


def _known(table: pa.Table, name: str, of: TruthOf, target: str = "") -> pa.ChunkedArray:
    """A column with true nulls for the texts that mean null in the main table: under this name, or as the column that
    is the `target` itself."""
    values = table.column(name)
    if kind_of_type(values.type) != "string":
        return values
    main = of.data.main
    texts = (*of.data.null_texts(main, name), *of.data.null_texts(main, target))
    return without_null_strings(values.cast(pa.string()), texts)


def _finished(values: pa.ChunkedArray, name: str, of: TruthOf) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """A column that holds the target itself."""
    kind = kind_of_type(values.type)
    if of.text:
        if kind not in ("string", "int", "bool", "float"):
            raise _other_type(of, name, values.type, "class names")
        return _classes(column_from_arrow(values, kind), name, of)
    if kind not in ("float", "int", "bool"):
        raise _other_type(of, name, values.type, _wanted(of))
    column = column_from_arrow(values.cast(pa.float64()) if kind == "float" else values, kind)
    return _numbers(Masked(column.to_wire().astype(np.float64), column.null), name, of)


def _computed(table: pa.Table, text: str, of: TruthOf) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """The spec's expression over raw columns of the label table, derived ones included."""
    columns = _raw_columns(table, text, of)
    kinds: dict[str, Kind] = {name: column.kind for name, column in columns.items()}
    rows = table.num_rows
    for name in of.data.derived:
        if name in of.data.made_of(parse(text).columns) and name not in columns:
            columns[name] = derive(_typed(of.data.derived[name], kinds, table, of), columns, rows, exact=True)
            kinds[name] = columns[name].kind
    expression = _typed(text, kinds, table, of)
    result = evaluate_columns(expression, columns, rows)
    if of.text:
        return _classes_of(result, text, of)
    if result.values.dtype.kind in "USOT":
        reason = f"gives strings for {text!r}; needed are {_wanted(of)}"
        raise LabelsUnfit(model=of.model, column="", reason=reason)
    return _numbers(Masked(result.values.astype(np.float64), result.null), "", of)


def _raw_columns(table: pa.Table, text: str, of: TruthOf) -> dict[str, Column]:
    wanted = [name for name in of.data.made_of(parse(text).columns) if name not in of.data.derived]
    have = [name for name in of.data.derived if name in table.column_names]
    missing = [name for name in wanted if name not in table.column_names]
    direct = set(parse(text).columns)
    if missing and not direct <= set(table.column_names):
        offered = f"a column {FINISHED[0]} with {text!r} itself, or the columns it is made of"
        found = ", ".join(table.column_names)
        raise LabelsUnfit(
            model=of.model,
            column="",
            reason=f"has no {', '.join(sorted(missing))}: give {offered}; found: {found}",
        )
    columns = {}
    for name in [*(name for name in wanted if name in table.column_names), *have]:
        kind = kind_of_type(table.column(name).type)
        if kind is None:
            raise _other_type(of, name, table.column(name).type, "a plain value")
        columns[name] = column_from_arrow(_known(table, name, of), kind)
    return columns


def _typed(text: str, kinds: Mapping[str, Kind], table: pa.Table, of: TruthOf) -> Typed:
    try:
        return typed(text, kinds)
    except ExpressionError as error:
        for name in parse(text).columns:  # which column, with which type, would fit?
            if kinds[name] == "string" and _is_truth(parse(text).root, name):
                found = table.column(name).type
                raise _other_type(of, name, found, f"true and false for {text!r}") from error
            for kind, words in _KIND_WORDS.items():
                try:
                    typed(text, {**kinds, name: kind})
                except ExpressionError:
                    continue
                raise _other_type(of, name, table.column(name).type, f"{words} for {text!r}") from error
        raise LabelsUnfit(model=of.model, column="", reason=f"does not fit {text!r}: {error}") from error


def _is_truth(node: Node, name: str) -> bool:
    """Whether an expression takes a column as a boolean: in `and`, `or`, `not`, or compared with true or false."""
    here = any(child.kind == "column" and child.value == name for child in node.children)
    booleans = any(child.kind == "literal" and isinstance(child.value, bool) for child in node.children)
    if here and (node.kind in ("and", "or", "not") or (booleans and node.kind in COMPARISONS)):
        return True
    return any(_is_truth(child, name) for child in node.children)


_KIND_WORDS: Mapping[Kind, str] = {"float": "numbers", "string": "text", "timestamp": "times"}


def _numbers(result: Masked, name: str, of: TruthOf) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    values, known = result.values, ~result.null & ~np.isnan(result.values)
    if np.isinf(values[known]).any():
        raise LabelsUnfit(model=of.model, column=name, reason="holds infinite numbers")
    if of.schema.task == "binary" and not np.isin(values[known], (0.0, 1.0)).all():
        other = values[known][~np.isin(values[known], (0.0, 1.0))]
        reason = f"holds {_some(other)}; a binary label is true or false, 1 or 0"
        raise LabelsUnfit(model=of.model, column=name, reason=reason)
    return pa.array(np.where(known, values, 0.0)), known


def _classes(column: Column, name: str, of: TruthOf) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    values: npt.NDArray[np.generic] = column.to_wire()
    if column.kind == "float":
        values = np.where(column.null, 0, values).astype(np.int64)
    return _classes_of(Masked(values, column.null), name, of)


def _classes_of(result: Masked, name: str, of: TruthOf) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    known = ~result.null
    texts = result.values.astype(np.int64) if result.values.dtype.kind == "b" else result.values
    found = pc.if_else(pa.array(known), pa.array(map(str, texts.tolist()), pa.string()), "")
    classes = of.schema.classes or ()
    strange = pc.filter(found, pa.array(known & ~np.asarray(pc.is_in(found, pa.array(classes, pa.string())))))
    if len(strange):
        named = f"the classes are {', '.join(classes[:20])}{', ...' if len(classes) > 20 else ''}"
        reason = f"holds {_some(pc.unique(strange).to_pylist())}; {named}"
        raise LabelsUnfit(model=of.model, column=name, reason=reason)
    return found, known


def _wanted(of: TruthOf) -> str:
    return "true and false, or 0 and 1" if of.schema.task == "binary" else "numbers"


def _some(values: object) -> str:
    distinct = list(dict.fromkeys(np.asarray(values).tolist()))
    more = f" and {len(distinct) - _SHOWN} other values" if len(distinct) > _SHOWN else ""
    return f"{', '.join(repr(value) for value in distinct[:_SHOWN])}{more}"


def _other_type(of: TruthOf, name: str, found: pa.DataType, wanted: str) -> LabelsUnfit:
    return LabelsUnfit(model=of.model, column=name, reason=f"has type {found}, needed are {wanted}")
