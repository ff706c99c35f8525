"""Reads what a spec is drafted from: rows spread over the whole table."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column, column_from_arrow, kind_of_type
from serin.errors import ColumnUnusable
from serin.etl.relational.groups import joined
from serin.etl.sources.find import find_table
from serin.etl.sources.malformed import odd_text
from serin.etl.sources.tables import Piece, Read, Table, open_table, read_piece, spread_pieces
from serin.spec.tables import TableSource

READ_ROWS = 500_000
_SCORED_ROWS = 100_000
_LOOKED_THROUGH = 8  # files, for the value that makes a text of numbers

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableSample:
    """`columns`: the rows that were read. `first`: which of them do not repeat an earlier one in every column.
    `unusable`: columns of which nothing can be made, and why. `odd`: text columns that are numbers but for a value,
    which is named."""

    columns: Mapping[str, Column]
    rows: int
    read: int
    first: Mask
    unusable: Mapping[str, str]
    odd: Mapping[str, str]

    def renamed(self, names: Mapping[str, str]) -> TableSample:
        """The sample with columns called otherwise; `names`: old -> new."""

        def called(values: Mapping[str, Any]) -> dict[str, Any]:
            return {names.get(name, name): value for name, value in values.items()}

        return replace(self, columns=called(self.columns), odd=called(self.odd))

    @property
    def complete(self) -> bool:
        return self.read == self.rows

    @property
    def repeated(self) -> int:
        """How many of the rows repeat an earlier one in every column."""
        return int((~self.first).sum())

    @property
    def scored(self) -> slice:
        """Evenly spaced rows, few enough to score every column with."""
        return slice(None, None, -(-self.read // _SCORED_ROWS) or 1)

    @property
    def source(self) -> str:
        """What was read, in words."""
        if self.complete:
            return f"all {self.rows:,} rows"
        return f"{self.read:,} of {self.rows:,} rows, spread over the table"


def sample_table(source: TableSource) -> TableSample:
    """Up to about READ_ROWS rows, or one row group when that has more. Text that is a time throughout is one."""
    with tempfile.TemporaryDirectory() as scratch:
        opened = open_table("main", find_table("main", source), Path(scratch))
        unusable = {
            name: f"is a {arrow}, which nothing can be made of"
            for name, arrow in opened.types.items()
            if kind_of_type(arrow) is None
        }
        reads = [
            Read(column=name, kind=kind, exact=True)
            for name, arrow in opened.types.items()
            if (kind := kind_of_type(arrow)) is not None
        ]
        pieces = spread_pieces(opened, READ_ROWS)
        columns = _read(pieces, reads, unusable)
        for name, column in columns.items():
            if column.kind == "string":
                columns[name] = _as_time(column)
        return TableSample(
            columns=columns,
            rows=opened.rows,
            read=sum(piece.rows for piece in pieces),
            first=_first_of_equal_rows(columns),
            unusable=unusable,
            odd=_odd_texts(opened, columns),
        )


def _read(pieces: Sequence[Piece], reads: Sequence[Read], unusable: dict[str, str]) -> dict[str, Column]:
    """The columns, without those that cannot be read as their kind, which become unusable."""
    try:
        found = [read_piece(piece, reads) for piece in pieces]
        return {read.column: joined([each[read.column] for each in found]) for read in reads}
    except ColumnUnusable as error:
        if len(reads) == 1:
            unusable[reads[0].column] = str(error)
            return {}
        half = len(reads) // 2
        return _read(pieces, reads[:half], unusable) | _read(pieces, reads[half:], unusable)


def _as_time(column: Column) -> Column:
    assert column.dictionary is not None
    if len(column.dictionary) == 0:
        return column
    try:
        return column_from_arrow(column.to_arrow(), "timestamp")
    except ValueError:  # pa.ArrowInvalid is one
        return column


def _first_of_equal_rows(columns: Mapping[str, Column]) -> Mask:
    rows = len(next(iter(columns.values()))) if columns else 0
    state = np.zeros(rows, np.uint64)
    for column in columns.values():
        values = column.values.astype(np.float64) + 0.0 if column.kind == "float" else column.values
        bits = (
            values.view(np.uint64) if values.dtype.itemsize == 8 else values.astype(np.int64).view(np.uint64)
        )
        state = _mixed(state * np.uint64(0x9E3779B97F4A7C15) + bits)
    first = np.zeros(rows, bool)
    first[np.unique(state, return_index=True)[1]] = True
    return first


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A 64-bit finalizer (splitmix64): every bit of a value changes about half of the result."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _odd_texts(table: Table, columns: Mapping[str, Column]) -> dict[str, str]:
    files = list(dict.fromkeys(group.file for group in table.groups))[:_LOOKED_THROUGH]
    texts = [name for name, column in columns.items() if column.kind == "string"]
    inside = {name for file in files for name, _ in file.partition}
    found = {
        name: next(filter(None, (odd_text(file, name) for file in files)), None)
        for name in texts
        if name not in inside
    }
    return {name: text for name, text in found.items() if text}
