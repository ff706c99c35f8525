"""Columns stored as a small table of values with a position per row: work on them is done once per entry.

Joined columns are stored this way, and integers from a narrow range. They are on the host only. Code that reads
`values` can treat each as any other Column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.columns.column import Array, Column, array_module
from serin.formats.nulls import null_of
from serin.formats.schema import INT64_NULL, Kind

Positions = npt.NDArray[np.intp]
_WIDEST = 2**16  # integers within so wide a range are kept as positions
_ENTRIES_PER_ROW = 4  # of an existing table; one with more is not worth it
_ROWS_PER_ENTRY, _FEW_ENTRIES, _SOME_ROWS = 2, 2**13, 2**10  # of a table that is made for a column


class Places:
    """A position per row, none negative; shared by the columns of the same table. Immutable."""

    __slots__ = ("_parts", "_seen", "rows")

    def __init__(self, rows: Positions) -> None:
        self.rows = rows
        self._parts: dict[tuple[int, int], Places] = {}
        self._seen: tuple[Positions, npt.NDArray[np.int64]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Places, (self.rows,)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice | Array) -> Places:
        """Some of the rows. The same slice gives the same object, which keeps its counts."""
        if not isinstance(rows, slice):
            return Places(self.rows[rows] if rows.dtype == bool else np.take(self.rows, rows))
        start, stop, step = rows.indices(len(self.rows))
        if (start, stop, step) == (0, len(self.rows), 1):
            return self
        if step != 1:
            return Places(self.rows[rows])
        return self._parts.setdefault((start, stop), Places(self.rows[start:stop]))

    def seen(self) -> tuple[Positions, npt.NDArray[np.int64]]:
        """The positions that occur, and how often."""
        if self._seen is None:
            counts = np.bincount(self.rows)
            places = np.flatnonzero(counts)
            self._seen = places, counts[places]
        return self._seen


class CodedColumn(Column):
    """`entries[places]`, where a null is an entry like any other."""

    __slots__ = ("_made", "entries", "places")
    entries: Array
    places: Places

    def __init__(self, *, kind: Kind, entries: Array, places: Places) -> None:
        for name, value in (("kind", kind), ("dictionary", None), ("entries", entries), ("places", places)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_made", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (self.kind, self.entries, self.places)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def values(self) -> Array:
        """One value per row, made at the first access."""
        made: Array | None = self._made  # type: ignore[attr-defined]
        if made is None:
            made = np.take(self.entries, self.places.rows)
            object.__setattr__(self, "_made", made)
        return made

    @property
    def null(self) -> npt.NDArray[np.bool_]:
        null = self.of_entries().null
        if not null.any():
            return np.zeros(len(self), bool)
        return np.take(null, self.places.rows)

    def null_count(self, rows: Array | None = None) -> int:
        null = self.of_entries().null
        if rows is not None:
            return int(np.count_nonzero(np.take(null, np.take(self.places.rows, rows))))
        places, counts = self.places.seen()
        return int(counts[null[places]].sum())

    def of_entries(self) -> Column:
        """The table as a column."""
        return Column(kind=self.kind, values=self.entries)

    def __getitem__(self, rows: slice | Array) -> Column:
        return CodedColumn(kind=self.kind, entries=self.entries, places=self.places[rows])

    def taken(self, rows: Array, done: dict[int, Any]) -> Column:
        if id(self.places) not in done:
            done[id(self.places)] = self.places[rows]
        return CodedColumn(kind=self.kind, entries=self.entries, places=done[id(self.places)])

    @property
    def xp(self) -> Any:
        return np

    def on_host(self) -> Column:
        return self


def _remake(kind: Kind, entries: Array, places: Places) -> CodedColumn:
    return CodedColumn(kind=kind, entries=entries, places=places)


def look_up(table: Mapping[str, Column], found: Any) -> dict[str, Column]:
    """Returns the rows of a table at these positions; -1 gives a null. Numbers from a small table stay coded."""
    rows = len(next(iter(table.values()))) if table else 0
    if array_module(found) is not np or rows > len(found) * _ENTRIES_PER_ROW:
        return {name: column.take_or_null(found) for name, column in table.items()}
    places = Places(np.where(found < 0, rows, found))
    made: dict[str, Column] = {}
    for name, column in table.items():
        entries = np.append(column.values, np.asarray(null_of(column.kind), column.values.dtype))
        if column.dictionary is None:
            made[name] = CodedColumn(kind=column.kind, entries=entries, places=places)
        else:
            made[name] = Column(
                kind=column.kind, values=np.take(entries, places.rows), dictionary=column.dictionary
            )
    return made


def as_sent(column: Column) -> Column:
    """The same column; floats as a request holds them, float32."""
    if column.kind != "float":
        return column
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, in training as in serving
        if isinstance(column, CodedColumn):
            entries = column.entries.astype(np.float32, copy=False)
            return CodedColumn(kind="float", entries=entries, places=column.places)
        return Column(kind="float", values=column.values.astype(np.float32, copy=False))


def compact(column: Column) -> Column:
    """Returns the same column, with integers from a narrow range as positions in that range."""
    if column.kind != "int" or isinstance(column, CodedColumn) or not isinstance(column.values, np.ndarray):
        return column
    values, null = column.values, None
    if not len(values):
        return column
    low = int(values.min())
    if low == INT64_NULL:
        null = values == INT64_NULL
        if null.all():
            return column
        low = int(np.where(null, np.int64(2**63 - 1), values).min())
    width = int(values.max()) - low + 1
    most = max(len(values) // _ROWS_PER_ENTRY, _FEW_ENTRIES if len(values) >= _SOME_ROWS else 0)
    if width > min(_WIDEST, most):
        return column
    places = values - low if null is None else np.where(null, width, values - low)
    entries = np.append(np.arange(low, low + width), INT64_NULL)
    return CodedColumn(kind="int", entries=entries, places=Places(places))
