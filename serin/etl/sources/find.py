"""Finds what is behind an entry of `data.tables`: its files, with the options for reading them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from serin.errors import SourceUnreadable
from serin.etl.sources.files import find_files, format_of
from serin.formats.csv_format import csv_format
from serin.formats.dataset import SourceFile
from serin.spec.tables import TableSource, path_of


def find_table(name: str, table: TableSource, digests: Path | None = None) -> tuple[SourceFile, ...]:
    """The files behind an entry of `data.tables`, as `find_files` gives them, with the options for reading them."""
    files, form = find_files(name, path_of(table), digests), csv_format(table)
    if form is None:
        return files
    for file in files:
        if format_of(file.path) not in ("csv", None):
            reason = f"it is {format_of(file.path)}, and the table has options for CSV files; remove them"
            raise SourceUnreadable(table=name, path=file.path, reason=reason)
    return tuple(replace(file, csv=form) for file in files)
