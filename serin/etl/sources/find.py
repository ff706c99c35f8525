"""Finds what is behind an entry of `data.tables`: its files, with the options for reading them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from serin.errors import SourceUnreadable
from serin.etl.sources.delta import find_delta
from serin.etl.sources.files import find_files, format_of
from serin.etl.sources.sql import read_sql, unread
from serin.formats.csv_format import csv_format
from serin.formats.dataset import SourceFile
from serin.spec.tables import DeltaTable, FileTable, SqlTable, TableSource
from serin.store.file_digests import settled_mark

SQL = "sql"  # the folder of query results among what builds keep
Sources = Mapping[str, tuple[SourceFile, ...]]


def find_table(
    name: str,
    table: TableSource,
    digests: Path | None = None,
    *,
    rows: Path | None = None,
    most_rows: int | None = None,
) -> tuple[SourceFile, ...]:
    """The files behind an entry of `data.tables`, as `find_files` gives them, with what is known of them.

    A query is asked only when there is a folder for its `rows`; then at most `most_rows` of them are read. Without the
    folder its entry has no content and cannot be opened.
    """
    match table:
        case SqlTable():
            found = unread(name, table) if rows is None else read_sql(name, table, rows, most_rows=most_rows)
            return (found,)
        case DeltaTable():
            return find_delta(name, table, digests)
        case FileTable():
            return _with_options(name, table, find_files(name, table.path, digests))
    return find_files(name, table, digests)


def _with_options(name: str, table: FileTable, files: tuple[SourceFile, ...]) -> tuple[SourceFile, ...]:
    form = csv_format(table)
    if form is None:
        return files
    for file in files:
        if format_of(file.path) not in ("csv", None):
            reason = f"it is {format_of(file.path)}, and the table has options for CSV files; remove them"
            raise SourceUnreadable(table=name, path=file.path, reason=reason)
    return tuple(replace(file, csv=form) for file in files)


def find_again(
    name: str, table: TableSource, before: Iterable[SourceFile], rows: Path, digests: Path | None = None
) -> tuple[SourceFile, ...]:
    """The files that a dataset was made from: of the same snapshot where the table has any."""
    kind = "delta" if isinstance(table, DeltaTable) else "sql"
    known = [
        file
        for file in before
        if file.table == name and file.snapshot is not None and file.snapshot.kind == kind
    ]
    if isinstance(table, DeltaTable) and known:
        return find_table(name, at_version(table, known[0]), digests)
    if not isinstance(table, SqlTable) or not known:
        return find_table(name, table, digests, rows=rows)
    if Path(known[0].path).is_file():
        return (known[0],)
    now = read_sql(name, table, rows)
    if now.content != known[0].content:
        reason = (
            "its rows have changed since the dataset was built, and the old ones are gone; build it again"
        )
        raise SourceUnreadable(table=name, path=table.connection, reason=reason)
    return (now,)


def at_version(table: DeltaTable, file: SourceFile) -> DeltaTable:
    """The table at the version that the file is of."""
    assert file.snapshot is not None
    return table.model_copy(update={"version": int(file.snapshot.version), "as_of": None})


def find_settled(tables: Mapping[str, TableSource]) -> tuple[Sources, Callable[[], bool]] | None:
    """The files of the tables, without digests, and a function that says whether they are unchanged since; None when
    digests have to be computed before the files are read.

    Only for local Parquet files that had not changed for a while: their stat shows every change from then on.
    """
    places = [table.path if isinstance(table, FileTable) else table for table in tables.values()]
    if not all(isinstance(place, str) and "://" not in place for place in places):
        return None
    sources = {name: find_table(name, table) for name, table in tables.items()}
    paths = {file.path for files in sources.values() for file in files}
    marks = {path: settled_mark(Path(path)) if format_of(path) == "parquet" else None for path in paths}
    if None in marks.values():
        return None
    return sources, lambda: all(settled_mark(Path(path)) == mark for path, mark in marks.items())


@contextmanager
def computed_beside(compute: Callable[[], Sources]) -> Iterator[Callable[[], Sources]]:
    """Computes in another thread while the block runs; what is yielded waits for the result."""
    with ThreadPoolExecutor(1, thread_name_prefix="digests") as thread:
        yield thread.submit(compute).result
