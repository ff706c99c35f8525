"""Takes a table of labels: finds the key and the truth of each row, and stores them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.errors import LabelsUnfit, RowsUnfit, nearest
from serin.formats.schema import INT64_NULL, InputColumn
from serin.formats.wire import wire_column
from serin.monitoring.quality.keys import Key, choose_key, label_keys, without_row
from serin.monitoring.quality.store import KEY, LABEL, ONLY_ROW, WHEN, LabelFile, write_labels
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """The outcome for a table of labels. `missing`: without a truth; `without_key`: with a null in
    the key; `repeated`: replaced by a later one in the same table. `file`: None when the same table was added just
    before."""

    rows: int
    stored: int
    missing: int
    without_key: int
    repeated: int
    key: Key
    file: LabelFile | None


def add_labels(home: Path, of: TruthOf, table: pa.Table, columns: Columns, now: float) -> Added:
    """Stores the labels of a table. LabelsUnfit names a column that is missing, of the wrong type or with a value that
    is not a label; then nothing is stored."""
    if not table.num_rows:
        raise LabelsUnfit(model=of.model, column="", reason="has no rows")
    table = _named(table, columns, of.model)
    key = choose_key(table, of.data, of.schema, of.model, columns.on)
    keys, without_key = label_keys(table, key, of.schema, of.model)
    truth, known = read_truth(table, of, columns.value)
    labels = pa.table(
        {
            KEY: keys,
            LABEL: truth,
            WHEN: _times(table, columns.time, of.model),
            ONLY_ROW: pa.array(without_row(table, of.model) & key.of_request),
        }
    )
    good = known & ~without_key
    kept = newest(labels.filter(pa.array(good)))
    file = write_labels(home, of.model, kept, key, of.expression, now) if kept.num_rows else None
    return Added(
        rows=table.num_rows,
        stored=kept.num_rows,
        missing=int(np.count_nonzero(~known)),
        without_key=int(np.count_nonzero(known & without_key)),
        repeated=int(np.count_nonzero(good)) - kept.num_rows,
        key=key,
        file=file,
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


def _named(table: pa.Table, columns: Columns, model: str) -> pa.Table:
    """The table with the usual names for the columns that the caller names."""
    names = list(table.column_names)
    if twice := [name for name in names if names.count(name) > 1]:
        raise LabelsUnfit(model=model, column=twice[0], reason="is there twice")
    for given, usual in ((columns.id, "_id"), (columns.row, "_row"), (columns.client_id, "_client_id")):
        if given is None or given == usual:
            continue
        if given not in names:
            raise LabelsUnfit(model=model, column=given, reason=f"is missing{nearest(given, names)}")
        table = table.drop_columns([usual]) if usual in table.column_names else table
        table = table.append_column(usual, table.column(given))
    if columns.client_id is not None and columns.id is None and "_id" in table.column_names:
        table = table.drop_columns(["_id"])
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
        raise LabelsUnfit(model=model, column=name, reason=error.reason) from error
    return pc.if_else(pa.array(values == INT64_NULL), pa.scalar(None, pa.int64()), pa.array(values))
