"""Reads recorded requests: all of a period, or what is new since the last look."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from serin.formats.captures import (
    METADATA,
    Part,
    captures_folder,
    hour_began,
    hour_folders,
    open_part,
    part_map,
    parts_of_hour,
    published,
    readable_document,
)

_TRIES = 5  # a part may be merged or deleted between the look and the read
_HOUR_S = 3600.0
_BATCH_ROWS = 1 << 16


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """Records that are laid out like a home's. `last`: the number up to which all parts are in place; None: a home
    says that itself."""

    home: Path
    last: int | None = None


Sources = Mapping[str, Source]
"""Records by the name of the home that wrote them."""


def records_in(home: Path) -> Sources:
    """The records of one machine."""
    return {"": Source(home)}


def captured(
    home: Path,
    model: str,
    *,
    versions: Collection[int] | None = None,
    since: float | None = None,
    until: float | None = None,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """The rows that arrived from `since` to before `until` (seconds since 1970), in the order in which they were
    recorded. `columns`: the only ones to read; those that no version has are left out. An empty table has the metadata
    columns."""
    tables = list(captured_tables(home, model, versions=versions, since=since, until=until, columns=columns))
    if not tables:
        wanted = METADATA if columns is None else {n: t for n, t in METADATA.items() if n in columns}
        return pa.schema(list(wanted.items())).empty_table()
    return alike(tables)


def captured_tables(
    home: Path,
    model: str,
    *,
    versions: Collection[int] | None = None,
    since: float | None = None,
    until: float | None = None,
    columns: Sequence[str] | None = None,
) -> Iterator[pa.Table]:
    """The rows that `captured` returns, one file at a time: for more rows than fit into memory."""
    readable_document(home, model)
    for folder in hour_folders(home, model, versions):
        if overlaps(folder.name, since, until):
            yield from (table for table in hour_tables(folder, since, until, columns) if table.num_rows)


def overlaps(hour: str, since: float | None, until: float | None) -> bool:
    """Whether rows of an hour can have arrived from `since` to before `until`."""
    began = hour_began(hour)
    return (since is None or began + _HOUR_S > since) and (until is None or began < until)


def captured_hour(folder: Path, columns: Sequence[str] | None = None) -> pa.Table | None:
    """The rows in the folder of one hour of one version; None when there are none."""
    tables = list(hour_tables(folder, columns=columns))
    return alike(tables) if tables else None


def parts(home: Path, model: str, *, after: str | None = None, until: int | None = None) -> list[Part]:
    """The parts that were written after the one whose `sequence` is `after`, in the order of writing; those up to the
    number `until`, which are all in place, or None: all that are.

    Small parts are merged later: the result may have fewer parts than were written, with the same rows. Rows that were
    returned once are not returned again, and none is left out, if all parts of a result are seen.
    """
    seen = int(after or 0)
    if until is None:
        until = published(captures_folder(home, model), readable_document(home, model))
    if seen >= until:
        return []
    listed = [part for folder in hour_folders(home, model) for part in parts_of_hour(folder)]
    return _between_numbers(listed, seen, until)


def batches(source: Source, model: str, *, after: str | None = None) -> Iterator[list[Part]]:
    """The same parts, some at a time: when all parts of a list are seen, the `sequence` of its last one says so. A
    merged file, which may have rows before and after those of others, is then in several lists."""
    left, seen = parts(source.home, model, after=after, until=source.last), int(after or 0)
    end = left[-1].last if left else 0
    while left:
        rows = accumulate(part.rows for part in left)
        until = next((part.last for part, sum_ in zip(left, rows, strict=True) if sum_ >= _BATCH_ROWS), end)
        yield _between_numbers(left, seen, until)
        left, seen = _between_numbers(left, until, end), until


def newest(
    home: Path, model: str, rows: int, *, version: int | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """The last `rows` rows in the order of writing, out of all versions or one; all columns or some."""
    found: list[pa.Table] = []
    left = rows
    for part in reversed(parts(home, model)):
        if left <= 0:
            break
        if version is None or part.version == version:
            table = read_part(part, columns)
            if table is not None:
                found.append(table.slice(max(0, table.num_rows - left)))
                left -= found[-1].num_rows
    return alike(found[::-1]) if found else captured(home, model, versions=(), columns=columns)


def column_types(home: Path, model: str) -> dict[str, pa.DataType]:
    """The columns of all records and their types in the newest part."""
    readable_document(home, model)
    types: dict[str, pa.DataType] = {}
    for folder in hour_folders(home, model):
        for part in parts_of_hour(folder)[-1:]:
            types |= {field.name: field.type for field in pq.read_schema(part.path)}
    return types


def read_part(part: Part, columns: Sequence[str] | None = None) -> pa.Table | None:
    """The rows of a part; None when it was merged or deleted since it was listed: list the parts again."""
    try:
        with open_part(part.path) as file:
            return _read_file(file, columns).slice(part.offset, part.rows)
    except FileNotFoundError:
        return None


def part_tables(part: Part, columns: Sequence[str]) -> Iterator[pa.Table] | None:
    """The rows of a part, some thousands at a time: for parts that do not fit into memory. None when it was merged or
    deleted since it was listed; once begun, all of its rows come."""
    try:
        file = open_part(part.path)
    except FileNotFoundError:
        return None
    return _pieces(file, part, columns)


def _pieces(file: pq.ParquetFile, part: Part, columns: Sequence[str]) -> Iterator[pa.Table]:
    with file:
        known = [name for name in columns if name in file.schema_arrow.names]
        place, end = 0, part.offset + part.rows
        for batch in file.iter_batches(_BATCH_ROWS, columns=known):
            first, last = max(part.offset - place, 0), min(end - place, batch.num_rows)
            place += batch.num_rows
            if first < last:
                yield pa.Table.from_batches([batch.slice(first, last - first)]).replace_schema_metadata(None)


def alike(tables: Sequence[pa.Table]) -> pa.Table:
    """One table out of several whose columns may differ, as those of model versions do: what one lacks is null, numbers
    get the wider type, and what cannot be reconciled becomes a string."""
    schema = common_schema([table.schema for table in tables])
    return pa.concat_tables([fitted(table, schema) for table in tables])


def common_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """All columns of `schemas`, each with a type that holds the values of all of them."""
    types: dict[str, pa.DataType] = {}
    for schema in schemas:
        for field in schema:
            types[field.name] = _common(types.get(field.name, field.type), field.type)
    return pa.schema(list(types.items()))


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns of `schema`; what it lacks is null."""
    if table.schema.equals(schema):
        return table
    columns = []
    for field in schema:
        if field.name in table.column_names:
            columns.append(table.column(field.name).cast(field.type))
        else:
            columns.append(pa.nulls(table.num_rows, field.type))
    return pa.table(columns, schema=schema)


def _between_numbers(listed: Sequence[Part], seen: int, until: int) -> list[Part]:
    """The rows of the parts after `seen` up to `until`, in the order of writing."""
    found = [_cut(part, seen, until) for part in listed if part.last > seen and part.first <= until]
    return sorted((part for part in found if part.rows), key=lambda part: part.last)


def _cut(part: Part, seen: int, until: int) -> Part:
    """The rows of a file that belong to parts after `seen` up to `until`. They follow each other."""
    if part.first > seen and part.last <= until:
        return part
    part = replace(part, first=max(part.first, seen + 1), last=min(part.last, until))
    try:
        numbers = part_map(part.path)
    except FileNotFoundError:
        return part  # replaced just now; read_part will say so
    offset = sum(rows for number, rows in numbers if number < part.first)
    rows = sum(rows for number, rows in numbers if part.first <= number <= part.last)
    return replace(part, rows=rows, offset=offset)


def hour_tables(
    folder: Path,
    since: float | None = None,
    until: float | None = None,
    columns: Sequence[str] | None = None,
    *,
    batch_rows: int | None = None,
) -> Iterator[pa.Table]:
    """The rows of each file, or at most `batch_rows` of them at a time. All files are opened before the first is read:
    what is merged then is read as it was."""
    began = hour_began(folder.name)
    whole = (since is None or since <= began) and (until is None or until >= began + _HOUR_S)
    wanted = columns if columns is None or whole else list(dict.fromkeys([*columns, "_t"]))
    with ExitStack() as stack:
        for file in _open_files(folder, stack):
            for table in _read_batches(file, wanted, batch_rows):
                table = table if whole else _between(table, since, until)
                yield (
                    table
                    if columns is None
                    else table.select([n for n in columns if n in table.column_names])
                )


def _open_files(folder: Path, stack: ExitStack) -> list[pq.ParquetFile]:
    def opened() -> list[pq.ParquetFile]:
        with ExitStack() as trial:
            files = [trial.enter_context(open_part(part.path)) for part in parts_of_hour(folder)]
            stack.enter_context(trial.pop_all())
            return files

    return until_found(opened)


def until_found(read: Callable[[], T]) -> T:
    """Calls `read` again if a file was replaced between the look and the read."""
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError):
            return read()
    return read()


def _between(table: pa.Table, since: float | None, until: float | None) -> pa.Table:
    """The rows that arrived from `since` to before `until`."""
    t = pc.cast(table.column("_t"), pa.int64())
    first, last = (_microseconds(limit) for limit in (since, until))
    return table.filter(pc.and_(pc.greater_equal(t, first[0]), pc.less(t, last[1])))


def _microseconds(limit: float | None) -> tuple[int, int]:
    """A limit as the smallest and as the largest that it may be: without one, all of time."""
    if limit is None:
        return -(2**63), 2**63 - 1
    exact = math.ceil(limit * 1e6)
    return exact, exact


def _read_file(file: pq.ParquetFile, columns: Sequence[str] | None) -> pa.Table:
    known = file.schema_arrow.names
    table = file.read(columns if columns is None else [name for name in columns if name in known])
    return table.replace_schema_metadata(None)


def _read_batches(
    file: pq.ParquetFile, columns: Sequence[str] | None, batch_rows: int | None
) -> Iterator[pa.Table]:
    if batch_rows is None:
        yield _read_file(file, columns)
        return
    known = file.schema_arrow.names
    chosen = columns if columns is None else [name for name in columns if name in known]
    for batch in file.iter_batches(batch_rows, columns=chosen):
        yield pa.Table.from_batches([batch]).replace_schema_metadata(None)


def _common(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if one == other:
        return one
    try:
        pair = [pa.schema([("x", one)]), pa.schema([("x", other)])]
        return pa.unify_schemas(pair, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return pa.string()
