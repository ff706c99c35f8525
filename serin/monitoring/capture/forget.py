"""Deletes recorded rows for which an expression is true: a person's, for example. From a home, and from the records
that hosts have uploaded, where files that hold such rows are replaced by others without.

It may be cut short at any time and is done again then, with the same outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from serin.expressions import Expression, ExpressionError, Masked, evaluate, parse
from serin.formats.captures import (
    Part,
    file_name,
    hour_folders,
    open_part,
    parts_of_hour,
    readable_document,
    writing,
)
from serin.formats.shared_captures import RECORDS, SharedFile, file_key, in_force, shared_files
from serin.monitoring.capture.merge import rewrite, tidy
from serin.monitoring.capture.shared_read import Folder, SharedRecords, folders
from serin.monitoring.capture.shared_upload import create_once
from serin.store.file_list import listed

_TRIES: Final = 5  # a file may be replaced while its rows are looked at

Forgotten = Callable[[int, pa.Table], int]
"""Deletes what else is known of these rows of a version; returns how many labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """What was deleted. `labels`: how many labels were deleted with the rows. `leftovers`: files that were removed
    because a process that was killed had left them, such as an earlier deletion. `unread`: columns of the expression
    that some versions do not have; for those versions they are null."""

    rows: int
    files: int
    labels: int = 0
    leftovers: int = 0
    unread: tuple[str, ...] = ()


def forget(
    home: Path, model: str, where: str, *, remove: bool = True, also: Sequence[Forgotten] = ()
) -> Deletion:
    """Deletes the rows of all versions for which `where` is true. Raises ExpressionError when it cannot be computed:
    nothing is deleted then. `remove`: otherwise rows are only counted. `also`: called with the rows that a file loses
    before it is rewritten, so that a repeated call finds them after a crash. No file has the rows once this returns,
    also none that readers leave out."""
    expression = parse(where)
    known = column_types(home, model)
    if known:
        check_columns(expression, known)
    leftovers = tidy(home, model) if remove else 0
    rows = files = labels = 0
    unread: set[str] = set()
    for folder in hour_folders(home, model):
        with writing(home, model):
            for part in parts_of_hour(folder):
                going, missing = going_rows(part.path, expression, known)
                count = int(going.sum())
                unread |= missing
                if not count:
                    continue
                rows, files = rows + count, files + 1
                if remove:
                    if also:
                        rows_going = pq.read_table(part.path).filter(pa.array(going))
                        labels += sum(act(part.version, rows_going) for act in also)
                    rewrite(folder, [part], pa.array(~going))
    return Deletion(rows=rows, files=files, labels=labels, leftovers=leftovers, unread=tuple(sorted(unread)))


def check_columns(expression: Expression, known: Collection[str]) -> None:
    """Raises ExpressionError for a column that no record has."""
    for name in expression.columns:
        if name not in known:
            columns = ", ".join(sorted(known))
            problem = f"{expression.text!r}: the records have no column {name!r}; they have {columns}"
            raise ExpressionError(problem)


def going_rows(
    path: Path, expression: Expression, known: Mapping[str, pa.DataType]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], set[str]]:
    """For each row of a file whether the expression is true, and the columns that the file lacks: they are null there,
    with the type of `known`."""
    with open_part(path) as file:
        there = set(file.schema_arrow.names)
        table = file.read([name for name in dict.fromkeys(["_row", *expression.columns]) if name in there])
    missing = set(expression.columns) - there
    for name in missing:
        table = table.append_column(name, pa.nulls(table.num_rows, known[name]))
    return matches(expression, table.replace_schema_metadata(None)), missing


def matches(expression: Expression, table: pa.Table) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For each row whether the expression is true; null counts as false."""
    if not table.num_rows:
        return np.zeros(0, bool)
    names = ["_row", *expression.columns]  # at least one: it says how many rows there are
    result = evaluate(expression, {name: _masked(table.column(name)) for name in names})
    values = np.broadcast_to(result.values, (table.num_rows,))
    null = np.broadcast_to(result.null, (table.num_rows,))
    if values.dtype != bool:
        raise ExpressionError(f"{expression.text!r} is not a condition: write for example passenger_id == 17")
    return values & ~null


def _masked(column: pa.ChunkedArray) -> Masked:
    kind = column.type
    if pa.types.is_nested(kind):
        raise ExpressionError(f"columns of type {kind} cannot be used in a condition")
    if pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
        kind = column.type
    null = pc.is_null(column).to_numpy().astype(bool)
    fill = pa.scalar("" if pa.types.is_string(kind) else 0).cast(kind)
    values = pc.fill_null(column, fill).to_numpy()
    return Masked(np.asarray(values), null)


def column_types(home: Path, model: str) -> dict[str, pa.DataType]:
    """The columns of all records and their types in the newest part."""
    readable_document(home, model)
    types: dict[str, pa.DataType] = {}
    for folder in hour_folders(home, model):
        for part in parts_of_hour(folder)[-1:]:
            types |= {field.name: field.type for field in pq.read_schema(part.path)}
    return types


def forget_shared(records: SharedRecords, model: str, where: str, hosts: Collection[str]) -> Deletion:
    """Deletes the rows for which `where` is true from the files that `hosts` wrote. A column that none of them has
    is null there. Raises ExpressionError when the expression cannot be computed."""
    expression = parse(where)
    listing = [file for file in records.listing(model) if file.writer.host in hosts]
    known: dict[str, pa.DataType] = {}
    rows = files = 0
    for host in hosts:
        records.files.abandon_uploads(0.0, f"{RECORDS}{model}/{host}/")  # of a process that was killed
    for folder, _ in folders(listing):
        for trial in range(_TRIES):
            try:
                found = _forget_in(records, folder, expression, known)
                break
            except FileNotFoundError:
                if trial == _TRIES - 1:
                    raise
        rows, files = rows + found.rows, files + found.files
    return Deletion(rows=rows, files=files)


def _forget_in(
    records: SharedRecords, folder: Folder, expression: Expression, known: dict[str, pa.DataType]
) -> Deletion:
    writer, version, hour = folder
    listing = shared_files(records.files.entries(f"{writer.prefix}{version}/{hour}/"))
    current = in_force(listing)
    for file in listing:
        if file not in current:  # a reader leaves it out, but it may hold such rows
            records.files.remove(file.key)
    if not current:
        return Deletion(rows=0, files=0)
    place = records.fetch(folder, current)
    rows = files = 0
    for part in parts_of_hour(place):
        known |= {field.name: field.type for field in pq.read_schema(part.path)}
        if set(expression.columns) - known.keys():
            continue  # no value of such a column was recorded here so far
        going, _ = going_rows(part.path, expression, known)
        if count := int(going.sum()):
            rows, files = rows + count, files + 1
            old = next(file for file in current if file.name == part.path.name)
            _replace(records, place, part, old, pa.array(~going))
    return Deletion(rows=rows, files=files)


def _replace(records: SharedRecords, place: Path, part: Part, old: SharedFile, keep: pa.Array) -> None:
    """The copy on this host is rewritten like a file of a home, and uploaded before the old file is removed."""
    rewrite(place, [part], keep)
    left = int(keep.true_count)
    if left:
        path, numbers = place / file_name(part.first, part.last, left), (part.first, part.last)
        content = listed(path)
        assert content.sha256 is not None, "a file that is there has a digest"
        key = file_key(old.writer, old.version, old.hour, numbers, left, content.sha256)
        create_once(records.files, key, path, content.size)
    records.files.remove(old.key)
