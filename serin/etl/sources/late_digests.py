"""Computes the digests of a new dataset's files beside the work on them, where nothing has to know them before.

Only for local Parquet files that had not changed for a while: their stat shows every change from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serin.etl.sources.files import format_of
from serin.etl.sources.find import find_table
from serin.formats.dataset import SourceFile
from serin.spec.tables import FileTable, TableSource
from serin.store.file_digests import settled_mark

Sources = Mapping[str, tuple[SourceFile, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledFiles:
    """The files of all tables, without digests, and what the stat of each was before anything was read."""

    sources: Sources
    marks: Mapping[str, str]

    def unchanged(self) -> bool:
        return all(settled_mark(Path(path)) == mark for path, mark in self.marks.items())


def find_settled(tables: Mapping[str, TableSource]) -> SettledFiles | None:
    """The files of the tables; None when digests have to be computed before the files are read."""
    if not all(isinstance(table, str | FileTable) for table in tables.values()):
        return None
    if any(
        "://" in (table.path if isinstance(table, FileTable) else str(table)) for table in tables.values()
    ):
        return None
    sources = {name: find_table(name, table) for name, table in tables.items()}
    paths = [file.path for found in sources.values() for file in found]
    marks = {path: settled_mark(Path(path)) for path in paths if format_of(path) == "parquet"}
    known = {path: mark for path, mark in marks.items() if mark is not None}
    return SettledFiles(sources=sources, marks=known) if len(known) == len(set(paths)) else None


@contextmanager
def computed_beside(compute: Callable[[], Sources]) -> Iterator[Callable[[], Sources]]:
    """Computes in another thread while the block runs; what is yielded waits for the result."""
    with ThreadPoolExecutor(1, thread_name_prefix="digests") as thread:
        yield thread.submit(compute).result
