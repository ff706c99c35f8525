"""Reads rows as a build does, before one: finds what a build would refuse because of the values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column
from serin.columns.unscaled import unscaled_warning
from serin.errors import ColumnUnusable, SerinError
from serin.etl.binding.layout import LaidOut, Layout
from serin.etl.binding.problems import Problems
from serin.etl.dataset.split import future_warning
from serin.etl.engines.memory_budget import partner_bytes
from serin.etl.relational.checks import failures_of
from serin.etl.relational.relation import LoadedJoin, Prepared, finish, load_join, relate_columns
from serin.etl.relational.target import check_classes, check_varies, evaluate_target, merge_classes
from serin.etl.relational.totals import added, refuse_empty
from serin.etl.sources.tables import Piece, Read, Table, read_piece, spread_pieces
from serin.spec.data import DataSpec
from serin.spec.features import FeatureSpec

FloatArray = npt.NDArray[np.floating]
MAX_ROWS = 200_000
_JOIN_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`rows`: how many rows of the main table were read, of `total`. `unread`: joined tables that are too large to be
    read here, so that nothing is known about their keys. `training_s`: how long the training period is, where all rows
    were read and have a time. `unscaled`: a sentence about numbers that no step brings to the size that a network
    needs. `future`: a sentence about times that have not come yet."""

    rows: int
    total: int
    unread: tuple[str, ...] = ()
    training_s: float | None = None
    unscaled: str | None = None
    future: str | None = None


def try_rows(
    data: DataSpec,
    features: Sequence[FeatureSpec],
    laid: LaidOut,
    tables: Mapping[str, Table],
    problems: Problems,
) -> Trial:
    """Collects what the values of up to MAX_ROWS rows, spread over the main table, and the keys of the joined tables
    show to be wrong, as far as the spec fits the tables. What only all rows can show is judged when all were read."""
    joins, unread = _load_joins(data, laid, tables, problems)
    if data.main not in tables:
        return Trial(rows=0, total=0, unread=unread)
    main = tables[data.main]
    pieces = spread_pieces(main, MAX_ROWS)
    found = Problems()
    prepared = []
    for piece in pieces:
        columns = _read_columns(piece, laid.reads, data.time, found)
        if laid.layout is not None and not found and len(joins) == len(data.joins):
            prepared += _prepare(piece, data, laid.layout, columns, joins, found)
        if found:
            break  # the other pieces would show the same
    rows = sum(piece.rows for piece in pieces)
    whole = not found and rows == main.rows and len(prepared) == len(pieces)
    if whole:
        _judge(data, features, prepared, found)
    problems.include(found)
    training_s = _training_s(data, prepared) if whole else None
    latest = [int(each.time.max()) for each in prepared if each.time is not None and len(each.time)]
    return Trial(
        rows=rows,
        total=main.rows,
        unread=unread,
        training_s=training_s,
        unscaled=unscaled_warning(_as_they_are(features, prepared)),
        future=future_warning(max(latest, default=0)),
    )


def _as_they_are(features: Sequence[FeatureSpec], prepared: Sequence[Prepared]) -> dict[str, FloatArray]:
    """The numbers whose steps leave them in the table's unit."""
    names = [
        column
        for feature in features
        for column in feature.columns
        if all(step.keeps_unit for step in feature.steps)
    ]
    found = {name: [each.columns[name] for each in prepared if name in each.columns] for name in names}
    return {
        name: np.concatenate([column.values[~column.null].astype(np.float64) for column in columns])
        for name, columns in found.items()
        if columns
    }


def _training_s(data: DataSpec, prepared: Sequence[Prepared]) -> float | None:
    """From the first training row to the last, by data.time."""
    if data.time is None:
        return None
    times = np.sort(np.concatenate([np.asarray(each.time) for each in prepared]))
    share = data.split.train if data.split_kind == "temporal" else 1.0
    first = times[: max(int(len(times) * share), 1)]
    return float(first[-1] - first[0]) / 1e6 if len(first) else None


def _load_joins(
    data: DataSpec, laid: LaidOut, tables: Mapping[str, Table], problems: Problems
) -> tuple[list[LoadedJoin], tuple[str, ...]]:
    joins, unread = [], []
    for join in laid.joins:
        table = tables[join.spec.table]
        if partner_bytes(join, table) > _JOIN_BYTES:
            unread.append(table.name)
            continue
        with problems.catching(f"data.joins[{data.joins.index(join.spec)}].on"):
            joins.append(load_join(join, table))
    return joins, tuple(unread)


def _read_columns(
    piece: Piece, reads: Sequence[Read], time: str | None, problems: Problems
) -> dict[str, Column]:
    """The columns that can be read. All at once; only where one of them cannot, in halves."""
    if len(reads) > 1:
        try:
            return dict(read_piece(piece, reads))
        except SerinError:
            half = len(reads) // 2
            parts = (_read_columns(piece, part, time, problems) for part in (reads[:half], reads[half:]))
            return {name: column for part in parts for name, column in part.items()}
    columns: dict[str, Column] = {}
    for read in reads:
        with problems.catching("data.time" if read.column == time else f"data.tables.{piece.file.table}"):
            columns |= read_piece(piece, [read])
    return columns


def _prepare(
    piece: Piece,
    data: DataSpec,
    layout: Layout,
    columns: Mapping[str, Column],
    joins: Sequence[LoadedJoin],
    problems: Problems,
) -> list[Prepared]:
    """The rows of a piece that are left; nothing when other pieces decide about them too."""
    rows = np.arange(piece.first_row, piece.first_row + piece.rows, dtype=np.int64)
    with problems.catching("data"):
        related = relate_columns(columns, rows, layout, joins)
        if data.unique is None and not layout.windows:
            return [finish(related, data, layout)]
        if set(data.target.columns) <= related.columns.keys():
            evaluate_target(data.target, related.columns, len(related.rows))
    return []


def _judge(
    data: DataSpec,
    features: Sequence[FeatureSpec],
    prepared: Sequence[Prepared],
    problems: Problems,
) -> None:
    for index, check in enumerate(data.checks):
        for failure in failures_of(check, [each.checks[index] for each in prepared]):
            if check.otherwise == "fail":
                problems.add(failure, f"data.checks[{index}]")
    rows = sum(len(each.rows) for each in prepared)
    with problems.catching("data"):
        refuse_empty(data, rows, added([each.dropped for each in prepared]))
        _judge_target(data, prepared)
    for index, feature in enumerate(features):
        for column in feature.columns if feature.steps[0].reads_numbers else ():
            if rows and all(each.columns[column].null.all() for each in prepared if column in each.columns):
                problem = f"column {column!r} has no value; remove it from the features, or fix the table"
                problems.add(ColumnUnusable(column=column, problem=problem), f"features[{index}].columns")


def _judge_target(data: DataSpec, prepared: Sequence[Prepared]) -> None:
    target = data.target
    classes = merge_classes(target, [each.target.classes or () for each in prepared])
    values = np.concatenate([np.asarray(each.target.coded(classes)) for each in prepared])
    columns = values.reshape(len(values), -1)
    if target.task == "regression":
        check_varies(target, np.stack([columns.min(axis=0), columns.max(axis=0)]))
        return
    labels = len(classes) or 2
    counts = [np.bincount(column.astype(np.int64), minlength=labels) for column in columns.T]
    check_classes(target, np.stack(counts) if target.names else counts[0], classes)
