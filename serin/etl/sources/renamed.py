"""Tables whose columns have the names that `data.rename` gives them. The files are read by their own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from serin.errors import SpecError, nearest
from serin.etl.sources.problems import Problems
from serin.etl.sources.tables import Table


def renamed_tables(
    rename: Mapping[str, Mapping[str, str]], tables: Mapping[str, Table], problems: Problems
) -> Mapping[str, Table]:
    """The tables under the spec's names. A name that does not fit the files is a problem; its table is left out, since
    nothing more can be said about its columns."""
    found = {}
    for name, table in tables.items():
        names = rename.get(name, {})
        wrong = list(_misfits(table, names))
        if wrong:
            problems.add(SpecError(where="data does not fit the tables", problems=wrong))
        else:
            found[name] = _renamed(table, names)
    return found


def _misfits(table: Table, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for old, new in names.items():
        key = f"data.rename.{table.name}.{old}"
        if old not in table.types:
            yield key, f"no column {old!r} in {table.name!r}{nearest(old, table.types)}"
        elif new in table.types:
            yield key, f"{table.name!r} has a column {new!r} already; choose another name"


def _renamed(table: Table, names: Mapping[str, str]) -> Table:
    if not names:
        return table
    types = {names.get(name, name): arrow for name, arrow in table.types.items()}
    return replace(table, types=types, stored={new: old for old, new in names.items()})
