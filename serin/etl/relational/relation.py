"""Relational work on one piece of the main table: joins, derived columns, filter, target, checks.

`prepare` is `relate`, then `finish`. What needs rows of other pieces (across_pieces/) is done between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from serin.columns.coded import as_sent, compact, look_up
from serin.columns.column import Column, any_true, array_module, beside, count_true, take
from serin.columns.derived import derive, evaluate_columns
from serin.columns.keys import KeyIndex
from serin.errors import JoinNotManyToOne
from serin.etl.binding.layout import JoinLayout, Layout
from serin.etl.relational.checks import CheckCounts, count_checks, shown_value
from serin.etl.relational.groups import AsOfIndex, group_hashes, joined
from serin.etl.relational.target import TargetPart, evaluate_target
from serin.etl.sources.tables import Piece, Table, cut, read_piece
from serin.formats.schema import INT64_NULL
from serin.spec.data import DataSpec

Rows = npt.NDArray[np.int64]
_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedJoin:
    """A table to be joined, in memory: its key index and the columns in use, by their name after the join."""

    layout: JoinLayout
    index: KeyIndex | None  # None: an as-of join by time alone
    moments: AsOfIndex | None
    columns: Mapping[str, Column]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Related:
    """A piece after joins, derived columns and the filter."""

    columns: Mapping[str, Column]
    rows: Rows
    dropped: Mapping[str, int]


class Unknown(NamedTuple):
    """Rows in which a column is null, and in which the target is null too."""

    rows: int
    null: int
    both: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """What is left of a piece: the rows that have a target, a time and a partner in every inner join."""

    columns: Mapping[str, Column]
    rows: Rows
    target: TargetPart
    time: npt.NDArray[np.int64] | None
    group: npt.NDArray[np.uint32] | None  # hash of the split's group
    id: Column | None
    dropped: Mapping[str, int]
    checks: tuple[CheckCounts, ...]
    unknown: Mapping[str, Unknown]


def load_join(layout: JoinLayout, table: Table) -> LoadedJoin:
    """Reads the table whole and proves that a key, with its time in an as-of join, finds at most one row."""
    pieces = [read_piece(piece, layout.reads) for piece in cut(table, table.rows)]
    whole = {name: joined([piece[name] for piece in pieces]) for name in pieces[0]}
    reads = [*layout.keys, *([layout.time] if layout.time else [])]
    every = KeyIndex([whole[read.column] for read in reads])
    repeated = every.duplicate()
    if repeated is not None:
        row, matches = repeated
        key = ", ".join(f"{read.column}={shown_value(whole[read.column], row)}" for read in reads)
        on = [read.column for read in reads]
        raise JoinNotManyToOne(table=table.name, on=on, key=f"({key})", matches=matches)
    keys = [whole[read.column] for read in layout.keys]
    index: KeyIndex | None = every
    moments = None
    if layout.time is not None:
        times = whole[layout.time.column].values
        index = KeyIndex(keys) if keys else None
        groups = index.find(keys) if index is not None else np.zeros(len(times), np.int64)
        moments = AsOfIndex(np.where(times == INT64_NULL, -1, groups), times)
    columns = {name: whole[column] for column, name in layout.columns.items()}
    return LoadedJoin(layout=layout, index=index, moments=moments, columns=columns)


def prepare(piece: Piece, data: DataSpec, layout: Layout, joins: Sequence[LoadedJoin]) -> Prepared:
    """Reads a piece and does all relational work on it, when no row depends on others."""
    return finish(relate(piece, layout, joins), data, layout)


def relate(piece: Piece, layout: Layout, joins: Sequence[LoadedJoin]) -> Related:
    columns = read_piece(piece, layout.reads)
    rows = np.arange(piece.first_row, piece.first_row + piece.rows, dtype=np.int64)
    return relate_columns(columns, rows, layout, joins)


def relate_columns(
    columns: Mapping[str, Column], rows: Rows, layout: Layout, joins: Sequence[LoadedJoin]
) -> Related:
    """The columns as they were read, wherever they are, to those after joins, derived columns and the filter."""
    read = len(rows)
    columns, rows = join_tables(columns, rows, joins)
    dropped = {"no_partner": read - len(rows)}
    columns = with_derived(columns, len(rows), layout, late=False)
    if layout.where is not None:
        truth = evaluate_columns(layout.where, columns, len(rows))
        keep = (truth.values != 0) & ~truth.null
        dropped["filtered"] = len(rows) - count_true(keep)
        columns, rows = take(columns, keep), rows[keep]
    return Related(columns=columns, rows=rows, dropped=dropped)


def finish(related: Related, data: DataSpec, layout: Layout) -> Prepared:
    """Late derived columns, checks and target; rows without a target or a time are dropped."""
    rows = related.rows
    columns = with_derived(related.columns, len(rows), layout, late=True)
    checks = count_checks(columns, rows, data.checks)
    target = evaluate_target(data.target, columns, len(rows))
    time = None if data.time is None else beside(columns[data.time].values, target.null)
    keep = ~target.null
    dropped = dict(related.dropped) | {"null_target": len(rows) - count_true(keep)}
    unknown = {} if data.time is None else _count_unknown(columns, layout.kept, target.null)
    if time is not None:
        dropped["null_time"] = 0
        if len(time) and int(time.min()) == INT64_NULL:  # the smallest of all
            timed = time != INT64_NULL
            dropped["null_time"] = count_true(keep & ~timed)
            keep &= timed
    group = None if data.split.group is None else beside(group_hashes(columns[data.split.group]), target.null)
    found = Prepared(
        columns={
            name: compact(as_sent(columns[name]) if name in layout.sent else columns[name])
            for name in layout.kept
        },
        rows=rows,
        target=target,
        time=time,
        group=group,
        id=None if data.id is None else columns[data.id],
        dropped=dropped,
        checks=checks,
        unknown=unknown,
    )
    return found if count_true(keep) == len(rows) else _only(found, keep, data.time)


def _count_unknown(
    columns: Mapping[str, Column], names: Sequence[str], target_null: npt.NDArray[np.bool_]
) -> dict[str, Unknown]:
    """How often each column is null together with the target, before rows without a target are dropped."""
    lost = np.flatnonzero(target_null)
    found = {}
    for name in names:
        column = columns[name]
        missing = column.null_count()
        both = column.null_count(lost) if missing and len(lost) else 0
        found[name] = Unknown(len(column), missing, both)
    return found


def _only(prepared: Prepared, keep: npt.NDArray[np.bool_], time: str | None) -> Prepared:
    places = np.flatnonzero(keep)
    columns = take(prepared.columns, places)
    taken = columns[time].values if time in columns else None  # which is not taken twice
    if taken is not None and array_module(taken) is not array_module(keep):
        taken = None
    return replace(
        prepared,
        columns=columns,
        rows=prepared.rows[places],
        target=prepared.target[places],
        time=taken if taken is not None or prepared.time is None else prepared.time[places],
        group=None if prepared.group is None else prepared.group[places],
        id=None if prepared.id is None else take({"id": prepared.id}, places)["id"],
    )


def with_derived(
    columns: Mapping[str, Column], rows: int, layout: Layout, *, late: bool
) -> dict[str, Column]:
    """The columns with the derived ones beside them: those that read windows, or those that do not. What the target is
    not made of reads floats as a request holds them, since the served model does so too."""
    known = dict(columns)
    sent = {name: as_sent(columns[name]) for name in layout.sent if name in columns}
    for each in (derived for derived in layout.derived if derived.late == late):
        own = known if each.exact else {**known, **sent}
        known[each.name] = derive(each.expression, own, rows, exact=each.exact)
    return known


def join_tables(
    columns: Mapping[str, Column], rows: Rows, joins: Sequence[LoadedJoin]
) -> tuple[dict[str, Column], Rows]:
    """The columns with those of the joined tables beside them; an inner join takes rows without a partner away."""
    known = dict(columns)
    for join in joins:
        found = _find(join, known)
        if join.layout.spec.how == "inner" and any_true(found < 0):
            keep = found >= 0
            known = take(known, keep)
            rows, found = rows[beside(keep, rows)], found[keep]
        known |= look_up(join.columns, found)
    return known, rows


def _find(join: LoadedJoin, columns: Mapping[str, Column]) -> Rows:
    """For each row the position of its partner, or -1."""
    spec = join.layout.spec
    if join.moments is None:
        assert join.index is not None
        return join.index.find([columns[key] for key in spec.here])
    assert spec.as_of is not None
    times = columns[spec.as_of.column].values
    groups = array_module(times).zeros(len(times), np.int64)
    if join.index:
        groups = beside(join.index.find([columns[key] for key in spec.here]), times)
    within = None if spec.as_of.within is None else round(spec.as_of.within * _US)
    known = np.where(times == INT64_NULL, np.int64(-1), groups)
    return join.moments.find(known, times, strict=spec.as_of.strict, within=within)
