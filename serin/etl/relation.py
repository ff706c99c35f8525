"""Relational work on one piece of the main table: joins, target, checks. Plain functions on columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.errors import JoinNotManyToOne
from serin.etl.checks import CheckCounts, count_checks
from serin.etl.layout import JoinLayout, Layout
from serin.etl.tables import Piece, Table, cut, read_piece
from serin.etl.target import TargetPart, evaluate_target
from serin.features.column import Column, column_from_arrow
from serin.features.keys import KeyIndex
from serin.formats.schema import INT64_NULL
from serin.spec.data import DataSpec

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedJoin:
    """A table to be joined, in memory: its key index and the columns in use, by their name after the join."""

    layout: JoinLayout
    index: KeyIndex
    columns: Mapping[str, Column]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """What is left of a piece: the rows that have a target, a time and a partner in every inner join."""

    columns: Mapping[str, Column]
    rows: Rows
    target: TargetPart
    time: npt.NDArray[np.int64] | None
    dropped: Mapping[str, int]
    checks: tuple[CheckCounts, ...]


def load_join(layout: JoinLayout, table: Table) -> LoadedJoin:
    """Reads the table whole and proves that a key finds at most one row."""
    whole = _concatenated([read_piece(piece, layout.reads) for piece in cut(table, table.rows)])
    index = KeyIndex([whole[read.column] for read in layout.keys])
    repeated = index.duplicate()
    if repeated is not None:
        row, matches = repeated
        key = ", ".join(f"{read.column}={_shown(whole[read.column], row)}" for read in layout.keys)
        raise JoinNotManyToOne(table=table.name, on=layout.spec.on, key=f"({key})", matches=matches)
    return LoadedJoin(
        layout=layout, index=index, columns={name: whole[column] for column, name in layout.columns.items()}
    )


def prepare(piece: Piece, data: DataSpec, layout: Layout, joins: Sequence[LoadedJoin]) -> Prepared:
    """Reads a piece and does all relational work on it."""
    columns = read_piece(piece, layout.reads)
    rows = np.arange(piece.first_row, piece.first_row + piece.rows, dtype=np.int64)
    columns, rows = join_tables(columns, rows, joins)
    dropped = {"no_partner": piece.rows - len(rows)}
    checks = count_checks(columns, rows, data.checks)
    target = evaluate_target(data.target, columns, len(rows))
    time = None if data.time is None else columns[data.time].values
    keep = ~target.null
    dropped["null_target"] = len(rows) - int(keep.sum())
    if time is not None:
        timed = time != INT64_NULL
        dropped["null_time"] = int((keep & ~timed).sum())
        keep &= timed
    columns = {name: columns[name] for name in layout.kept}
    if not keep.all():
        columns = {name: column[keep] for name, column in columns.items()}
        rows, target, time = rows[keep], target[keep], None if time is None else time[keep]
    return Prepared(columns=columns, rows=rows, target=target, time=time, dropped=dropped, checks=checks)


def join_tables(
    columns: Mapping[str, Column], rows: Rows, joins: Sequence[LoadedJoin]
) -> tuple[dict[str, Column], Rows]:
    """The columns with those of the joined tables beside them; an inner join takes rows without a partner away."""
    joined = dict(columns)
    for join in joins:
        spec = join.layout.spec
        found = join.index.find([joined[key] for key in spec.on])
        if spec.how == "inner" and (found < 0).any():
            keep = found >= 0
            joined = {name: column[keep] for name, column in joined.items()}
            rows, found = rows[keep], found[keep]
        for name, column in join.columns.items():
            joined[name] = column.take_or_null(found)
    return joined, rows


def _concatenated(pieces: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    if len(pieces) == 1:
        return dict(pieces[0])
    return {name: _joined([piece[name] for piece in pieces]) for name in pieces[0]}


def _joined(parts: Sequence[Column]) -> Column:
    if parts[0].kind == "string":
        return column_from_arrow(pa.chunked_array([part.to_arrow() for part in parts]), "string")
    return Column(kind=parts[0].kind, values=np.concatenate([part.values for part in parts]))


def _shown(column: Column, row: int) -> Any:
    value = column[row : row + 1].to_arrow().to_pylist()[0]
    return repr(value) if isinstance(value, str) else value
