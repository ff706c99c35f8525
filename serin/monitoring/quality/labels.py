"""Takes a table of labels: finds the key and the truth of each row, and stores them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.errors import LabelsUnfit, RowsUnfit, nearest
from serin.formats.schema import INT64_NULL, InputColumn
from serin.formats.wire import wire_column
from serin.monitoring.quality.keys import CLIENT_ID, ID, ROW, Key, choose_key, label_keys, without_row
from serin.monitoring.quality.store import (
    KEY,
    LABEL,
    ONLY_ROW,
    WHEN,
    LabelFile,
    ordered_by_time,
    write_labels,
)
from serin.monitoring.quality.truth import TruthOf, read_truth


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
        raise LabelsUnfit(model=of.model, column="", reason="has no rows")
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
    order = np.arange(labels.num_rows)
    if labels.column(WHEN).null_count < labels.num_rows:
        order = np.argsort(np.asarray(labels.column(WHEN).fill_null(INT64_NULL)), kind="stable")
    codes = labels.column(KEY).combine_chunks().dictionary_encode().indices.to_numpy()
    last = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    last[codes[order]] = order  # a later one overwrites an earlier one
    return labels if len(last) == labels.num_rows else labels.take(pa.array(np.sort(last)))


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
        raise LabelsUnfit(model=of.model, column=column, reason=error.reason) from error


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
