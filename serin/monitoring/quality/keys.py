"""How a label finds the rows it is about: by request id, by the client's id, or by columns of the request.

Every way ends in one text per row, so that labels and recorded rows are joined by equal texts. A label without a row
number is about the only row of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.hashing import hash_strings
from serin.errors import LabelsUnfit, RowsUnfit, nearest
from serin.formats.captures import column_names, parts_of_hour
from serin.formats.schema import InputColumn, Schema
from serin.formats.wire import wire_column
from serin.monitoring.capture.read import captured_hour
from serin.spec.data import DataSpec

ID, ROW, CLIENT_ID, TIME, SOURCE = "_id", "_row", "_client_id", "_t", "_source"
RELEASE = "_release"

_APART = "\x1f"
_SHOWN = 24
MOST_ROWS: Final = 1 << 24

Hashes = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """`by`: `_id`, `_client_id`, or the names of request columns."""

    by: tuple[str, ...]

    @property
    def of_request(self) -> bool:
        """Whether it names a request, and so at most one row."""
        return self.by in ((ID,), (CLIENT_ID,))

    def __str__(self) -> str:
        return ",".join(self.by)

    @classmethod
    def parse(cls, text: str) -> Key:
        return cls(by=tuple(text.split(",")))


def choose_key(
    table: pa.Table,
    data: DataSpec,
    schema: Schema,
    model: str,
    on: Sequence[str] = (),
    *,
    found: Sequence[str] = (),
) -> Key:
    """Returns how the labels of a table are joined: as asked (`on`), else by `_id`, `_client_id`, or the spec's
    `data.id` and `data.time`. `found`: the columns as their owner calls them, for errors."""
    found = found or table.column_names
    inputs = {column.name for column in schema.inputs}
    if on:
        if unknown := [name for name in on if name not in inputs]:
            reason = f"is not a column of the request{nearest(unknown[0], inputs)}"
            raise LabelsUnfit(model=model, column=unknown[0], reason=reason)
        if missing := [name for name in on if name not in table.column_names]:
            reason = f"is missing{nearest(missing[0], found)}"
            raise LabelsUnfit(model=model, column=missing[0], reason=reason)
        return Key(by=tuple(on))
    for name in (ID, CLIENT_ID):
        if name in table.column_names:
            return Key(by=(name,))
    own = tuple(name for name in (data.id, data.time) if name in inputs)
    if data.id in own and set(own) <= set(table.column_names):
        return Key(by=own)
    raise LabelsUnfit(model=model, column="", reason=_no_key(data, schema, found))


def _no_key(data: DataSpec, schema: Schema, found: Sequence[str]) -> str:
    """Why a table's labels cannot be joined, and what would help."""
    inputs = [column.name for column in schema.inputs]
    ways = f"{ID} (and {ROW}), {CLIENT_ID}"
    if data.id in inputs:
        ways += f", or {' and '.join(name for name in (data.id, data.time) if name in inputs)}"
    named = {"data.id": data.id, "data.time": data.time}
    away = [f"{key} ({name})" for key, name in named.items() if name is not None and name not in inputs]
    reason = f"has nothing that tells which request a label is about: give {ways}, or name request columns to join on"
    reason += f" (requests have {_listed(inputs)})"
    if away:
        are = "are" if len(away) > 1 else "is"
        reason += f"; {' and '.join(away)} {are} not in the requests"
    return f"{reason}; found: {_listed(found)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def label_keys(
    table: pa.Table, key: Key, schema: Schema, model: str
) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """The key of each label, and which labels have none because a part of it is null."""
    if key.of_request:
        (name,) = key.by
        ids = _texts(table.column(name), name, model)
        rows = _row_numbers(table, model)
        whole = pc.binary_join_element_wise(ids, rows.cast(pa.string()).fill_null("0"), _APART)
        return whole, np.asarray(pc.or_(pc.is_null(ids), pc.equal(ids.fill_null(""), "")))
    try:
        return _column_keys(table, _inputs(key, schema))
    except RowsUnfit as error:
        raise LabelsUnfit(model=model, column=error.column, reason=error.reason) from error


def without_row(table: pa.Table, model: str) -> npt.NDArray[np.bool_]:
    """Which labels name no row."""
    return np.asarray(_row_numbers(table, model).is_null())


def captured_keys(table: pa.Table, key: Key, schema: Schema) -> pa.Array:
    """The key of each recorded row, null where it has none."""
    if key.of_request:
        (name,) = key.by
        ids, rows = table.column(name).cast(pa.string()), table.column(ROW).cast(pa.string())
        found = pc.binary_join_element_wise(ids, rows, _APART)
        null = np.asarray(pc.equal(ids, "").fill_null(True))
    else:
        names = column_names([column.name for column in schema.inputs])
        found, null = _column_keys(
            pa.table({name: table.column(names[name]) for name in key.by}), _inputs(key, schema)
        )
    whole = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    return pc.if_else(pa.array(null), pa.scalar(None, pa.string()), whole)


def captured_columns(key: Key, schema: Schema) -> tuple[str, ...] | None:
    """The columns of the records that a key is made of; None when requests of this version lack one of them."""
    if key.of_request:
        return (key.by[0], ROW)
    names = column_names([column.name for column in schema.inputs])
    return tuple(names[name] for name in key.by) if set(key.by) <= names.keys() else None


def _inputs(key: Key, schema: Schema) -> list[InputColumn]:
    known = {column.name: column for column in schema.inputs}
    return [known[name] for name in key.by]


def _column_keys(table: pa.Table, columns: Sequence[InputColumn]) -> tuple[pa.Array, npt.NDArray[np.bool_]]:
    """Values as they travel to the model, as texts: a table with other types for the same values has the same keys."""
    null = np.zeros(table.num_rows, bool)
    texts = []
    for column in columns:
        values = wire_column(table.column(column.name), column).reshape(-1)
        text = (
            pa.array(values, pa.string()) if column.kind == "string" else pa.array(values).cast(pa.string())
        )
        texts.append(text)
        null |= np.asarray(pc.equal(text, column.null if column.kind != "string" else "")) | (
            np.isnan(values) if column.kind == "float" else False
        )
    if len(texts) == 1:
        return texts[0], null
    return pc.binary_join_element_wise(*texts, _APART), null


def _texts(values: pa.ChunkedArray, name: str, model: str) -> pa.Array:
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if values.type in (pa.null(), pa.string(), pa.large_string(), pa.string_view()):
        return values.cast(pa.string()).combine_chunks()
    raise LabelsUnfit(model=model, column=name, reason=f"has type {values.type}, needed are ids as text")


def _row_numbers(table: pa.Table, model: str) -> pa.Array:
    if ROW not in table.column_names:
        return pa.nulls(table.num_rows, pa.int64())
    rows = table.column(ROW)
    try:  # frames make floats of integers with nulls
        numbers = rows.cast(pa.float64()).cast(pa.int64()).combine_chunks()
    except pa.ArrowException as error:
        reason = f"has type {rows.type}, needed are row numbers from 0"
        raise LabelsUnfit(model=model, column=ROW, reason=reason) from error
    if len(numbers) and (least := pc.min(numbers).as_py()) is not None and least < 0:
        raise LabelsUnfit(model=model, column=ROW, reason=f"holds {least}, needed are row numbers from 0")
    return numbers


def request_of(keys: pa.Array) -> pa.Array:
    """The ids in keys by id or by the client's id."""
    return pc.list_element(pc.split_pattern(keys, _APART, max_splits=1, reverse=True), 0)


def first_rows(keys: pa.Array) -> pa.Array:
    """The keys of the first rows of the same requests, which every request has."""
    return pc.binary_join_element_wise(request_of(keys), "0", _APART)


# It keeps a hash of 32 bits for each recorded row in memory, four bytes a row and at most 64 MB for a model; hours
# beyond that are read in every search. Two keys with the same hash cost a read and nothing else.
class KeyIndex:
    """The keys of a model's records, read when they are first asked for and again when an hour has changed."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self._most = most_rows
        self._known: dict[tuple[Path, Key], tuple[tuple[str, ...], Hashes]] = {}
        self._rows = 0

    def may_have(self, folder: Path, key: Key, schema: Schema, wanted: Hashes) -> bool:
        """Whether an hour may have a row with one of the keys whose hashes are `wanted` (sorted). `folder`: the hour's,
        in a home."""
        if not len(wanted):
            return False
        here = self._hashes(folder, key, schema)
        place = np.minimum(np.searchsorted(wanted, here), len(wanted) - 1)
        return bool((wanted[place] == here).any())

    def _hashes(self, folder: Path, key: Key, schema: Schema) -> Hashes:
        files = tuple(part.path.name for part in parts_of_hour(folder))
        entry = folder, key
        before = self._known.get(entry)
        if before is not None and before[0] == files:
            return before[1]
        found = self._read(folder, key, schema)
        self._rows += len(found) - (0 if before is None else len(before[1]))
        if self._rows > self._most:
            self._rows -= len(found)
            self._known.pop(entry, None)
        else:
            self._known[entry] = files, found
        return found

    def _read(self, folder: Path, key: Key, schema: Schema) -> Hashes:
        columns = captured_columns(key, schema)
        assert columns is not None, "the caller knows that requests of this version have the columns"
        table = captured_hour(folder, columns)
        if table is None:
            return np.zeros(0, np.uint32)
        return hashes(captured_keys(table, key, schema).drop_null())


def hashes(keys: pa.Array) -> Hashes:
    """The different hashes of keys, sorted."""
    return np.unique(hash_strings(keys))
