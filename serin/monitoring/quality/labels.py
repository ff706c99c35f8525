"""Takes a table of labels: finds the key and the truth of each row, and stores them.

The truth is the finished target, or computed from the raw columns that the spec's target reads. A binary truth is 0 or
1 and a regression's a number; a class is kept as text, since its number may differ between versions. A row without a
value is missing: it is left out and counted, and never takes back an earlier label.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Column, column_from_arrow, kind_of_type
from serin.columns.derived import COMPARISONS, Typed, derive, evaluate_columns, typed
from serin.errors import LabelsUnfit, RowsUnfit, nearest
from serin.expressions import ExpressionError, Masked, Node, parse
from serin.formats.nulls import without_null_strings
from serin.formats.schema import INT64_NULL, InputColumn, Kind, Schema
from serin.formats.wire import wire_column
from serin.monitoring.quality.keys import CLIENT_ID, ID, ROW, Key, choose_key, label_keys, without_row
from serin.monitoring.quality.store import (
    KEY,
    LABEL,
    ONLY_ROW,
    WHEN,
    LabelFile,
    newest_places,
    ordered_by_time,
    write_labels,
)
from serin.spec.data import DataSpec

FINISHED = ("_label", "target", "label")
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a label table are what. None: by the usual names (`_id`, `_row`, `_client_id`; `_label`,
    `target` or `label`, else the raw columns of the target). `on`: request columns to join by instead of an id.
    `time`: the column that decides which of two labels for the same row is newer; by default the later arrival."""

    id: str | None = None
    row: str | None = None
    client_id: str | None = None
    on: tuple[str, ...] = ()
    value: str | None = None
    time: str | None = None

    @property
    def given(self) -> dict[str, str]:
        """The caller's names of the columns that have a usual name."""
        named = {ID: self.id, ROW: self.row, CLIENT_ID: self.client_id}
        return {usual: name for usual, name in named.items() if name is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The outcome for a table of labels. `missing`: without a truth; `without_key`: with a null in the key;
    `repeated`: replaced by a later one in the same table. `file`: None when no label is left, or the same table was
    added just before. `mixed`: labels that came before are ordered by a time column and these by arrival, or the other
    way round."""

    rows: int
    stored: int
    missing: int
    without_key: int
    repeated: int
    key: Key
    file: LabelFile | None
    mixed: bool = False


def add_labels(home: Path, of: TruthOf, table: pa.Table, columns: Columns, now: float) -> Added:
    """Stores the labels of a table. LabelsUnfit names a column that is missing, of the wrong type or with a value that
    is not a label; then nothing is stored."""
    if not table.num_rows:
        raise of.unfit("", "has no rows")
    _check_one_way(columns, of.model)
    key, keys, without_key, only_row = _keys(table, of, columns)
    truth, known = read_truth(table, of, columns.value)
    when = _times(table, columns.time, of.model)
    labels = pa.table({KEY: keys, LABEL: truth, WHEN: when, ONLY_ROW: pa.array(only_row)})
    good = known & ~without_key
    kept = newest(labels.filter(pa.array(good)))
    before = ordered_by_time(home, of.model)
    file = write_labels(home, of.model, kept, key, of.expression, now) if kept.num_rows else None
    return Added(
        rows=table.num_rows,
        stored=kept.num_rows,
        missing=int(np.count_nonzero(~known)),
        without_key=int(np.count_nonzero(known & without_key)),
        repeated=int(np.count_nonzero(good)) - kept.num_rows,
        key=key,
        file=file,
        mixed=file is not None and before is not None and before != (columns.time is not None),
    )


def newest(labels: pa.Table) -> pa.Table:
    """One label for each key: the one with the latest `when`, of equal ones the last."""
    places = newest_places(labels, labels.column(KEY).combine_chunks().dictionary_encode().indices.to_numpy())
    return labels if len(places) == labels.num_rows else labels.take(pa.array(places))


def _check_one_way(columns: Columns, model: str) -> None:
    """LabelsUnfit when the caller names two ways to find the rows of labels."""
    ways = [f"by request id ({columns.id})"] if columns.id else []
    ways += [f"by the client's id ({columns.client_id})"] if columns.client_id else []
    ways += [f"by request columns ({', '.join(columns.on)})"] if columns.on else []
    if len(ways) > 1:
        reason = f"cannot be joined {' and '.join(ways)}: name one of them"
        raise LabelsUnfit(model=model, column="", reason=reason)
    if columns.on and columns.row:
        reason = "is a row number, which belongs to a request's id; labels by request columns have none"
        raise LabelsUnfit(model=model, column=columns.row, reason=reason)


def _keys(
    table: pa.Table, of: TruthOf, columns: Columns
) -> tuple[Key, pa.Array, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """How the labels are joined, the key of each, which have none, and which name no row. Errors name the caller's
    columns."""
    named = _named(table, columns, of.model)
    try:
        key = choose_key(named, of.data, of.schema, of.model, columns.on, found=table.column_names)
        keys, without_key = label_keys(named, key, of.schema, of.model)
        return key, keys, without_key, without_row(named, of.model) & key.of_request
    except LabelsUnfit as error:
        column = columns.given.get(error.column, error.column)
        raise of.unfit(column, error.reason) from error


def _named(table: pa.Table, columns: Columns, model: str) -> pa.Table:
    """The table with the usual names for the columns that the caller names."""
    names = list(table.column_names)
    if twice := [name for name in names if names.count(name) > 1]:
        raise LabelsUnfit(model=model, column=twice[0], reason="is there twice")
    for usual, given in columns.given.items():
        if given == usual:
            continue
        if given not in names:
            raise LabelsUnfit(model=model, column=given, reason=f"is missing{nearest(given, names)}")
        table = table.drop_columns([usual]) if usual in table.column_names else table
        table = table.append_column(usual, table.column(given))
    if columns.client_id is not None and ID in table.column_names:
        table = table.drop_columns([ID])
    return table


def _times(table: pa.Table, name: str | None, model: str) -> pa.Array:
    if name is None:
        return pa.nulls(table.num_rows, pa.int64())
    if name not in table.column_names:
        raise LabelsUnfit(model=model, column=name, reason=f"is missing{nearest(name, table.column_names)}")
    column = InputColumn(name=name, dtype="INT64", kind="timestamp", null=str(INT64_NULL))
    try:
        values = wire_column(table.column(name), column).reshape(-1)
    except RowsUnfit as error:
        reason = (
            f"holds {_no_time(table.column(name), column)!r}; needed are times such as 2026-03-02T09:00:00"
        )
        raise LabelsUnfit(model=model, column=name, reason=reason) from error
    return pc.if_else(pa.array(values == INT64_NULL), pa.scalar(None, pa.int64()), pa.array(values))


def _no_time(values: pa.ChunkedArray, column: InputColumn) -> object:
    """The first of the values that is not a time, of which there is at least one."""
    while len(values) > 1:
        half = values.slice(0, len(values) // 2)
        try:
            wire_column(half, column)
            values = values.slice(len(half))
        except RowsUnfit:
            values = half
    return values[0].as_py()


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

    def unfit(self, column: str, reason: str) -> LabelsUnfit:
        return LabelsUnfit(model=self.model, column=column, reason=reason)


def read_truth(
    table: pa.Table, of: TruthOf, value: str | None = None
) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """Returns the truth of each row and which rows have one. `value`: the column with the finished target; None: a
    column that is called like one and not like an answer, else the raw columns of the target's expression. Several
    targets give lists."""
    names = of.schema.targets
    if names:
        if value is not None:
            raise of.unfit(value, f"cannot hold the targets {', '.join(names)}; give a column each")
        return _several(table, of)
    answers = {output.name for output in of.schema.outputs}  # a file of scores has them: not the truth
    usual = (name for name in FINISHED if name in table.column_names and name not in answers)
    chosen = value or next(usual, None)
    if chosen is not None:
        if chosen not in table.column_names:
            raise of.unfit(chosen, f"is missing{nearest(chosen, table.column_names)}")
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
        raise of.unfit("", f"gives strings for {text!r}; needed are {_wanted(of)}")
    return _numbers(Masked(result.values.astype(np.float64), result.null), "", of)


def _raw_columns(table: pa.Table, text: str, of: TruthOf) -> dict[str, Column]:
    wanted = [name for name in of.data.made_of(parse(text).columns) if name not in of.data.derived]
    have = [name for name in of.data.derived if name in table.column_names]
    missing = [name for name in wanted if name not in table.column_names]
    direct = set(parse(text).columns)
    if missing and not direct <= set(table.column_names):
        offered = f"a column {FINISHED[0]} with {text!r} itself, or the columns it is made of"
        found = ", ".join(table.column_names)
        raise of.unfit("", f"has no {', '.join(sorted(missing))}: give {offered}; found: {found}")
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
        raise of.unfit("", f"does not fit {text!r}: {error}") from error


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
        raise of.unfit(name, "holds infinite numbers")
    if of.schema.task == "binary" and not np.isin(values[known], (0.0, 1.0)).all():
        other = values[known][~np.isin(values[known], (0.0, 1.0))]
        raise of.unfit(name, f"holds {_some(other)}; a binary label is true or false, 1 or 0")
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
        raise of.unfit(name, f"holds {_some(pc.unique(strange).to_pylist())}; {named}")
    return found, known


def _wanted(of: TruthOf) -> str:
    return "true and false, or 0 and 1" if of.schema.task == "binary" else "numbers"


def _some(values: object) -> str:
    distinct = list(dict.fromkeys(np.asarray(values).tolist()))
    more = f" and {len(distinct) - _SHOWN} other values" if len(distinct) > _SHOWN else ""
    return f"{', '.join(repr(value) for value in distinct[:_SHOWN])}{more}"


def _other_type(of: TruthOf, name: str, found: pa.DataType, wanted: str) -> LabelsUnfit:
    return of.unfit(name, f"has type {found}, needed are {wanted}")
