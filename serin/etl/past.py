"""What rows decide about each other: which of several equal ones stays, and windows over the past.

Keys, times and values of all rows come together here; the results lie in files that every piece maps, by row id. So
neither the cut into pieces nor the engine shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.etl.engine import Engine, Held
from serin.etl.groups import Int64, group_codes, joined
from serin.etl.layout import Layout
from serin.etl.relation import LoadedJoin, Prepared, Related, finish, prepare, relate
from serin.etl.tables import Piece
from serin.etl.windows import look_back
from serin.features.column import Column, null_of
from serin.formats.schema import INT64_NULL, Kind
from serin.spec.data import DataSpec
from serin.spec.relation import UniqueSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MadeColumn:
    file: str  # one value per row of the main table
    kind: Kind
    dictionary: pa.Array | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Past:
    """`kept`: a file that says for each row of the main table whether it stays; None: all do."""

    columns: Mapping[str, MadeColumn]
    kept: str | None


def hold_prepared(
    engine: Engine,
    pieces: Sequence[Piece],
    data: DataSpec,
    layout: Layout,
    joins: Sequence[LoadedJoin],
    scratch: Path,
) -> Held:
    """The prepared pieces, held by the engine."""
    if data.unique is None and not layout.windows:
        return engine.hold(prepare, pieces, data, layout, joins)
    held = engine.hold(relate, pieces, layout, joins)
    rows = max(piece.first_row + piece.rows for piece in pieces)
    past = _look_at_all(engine, held, data, layout, rows, scratch)
    return engine.then(finish_with_past, held, data, layout, past)


def finish_with_past(related: Related, data: DataSpec, layout: Layout, past: Past) -> Prepared:
    columns, rows, dropped = dict(related.columns), related.rows, dict(related.dropped)
    if past.kept is not None:
        keep = np.load(past.kept, mmap_mode="r")[rows]
        dropped["duplicate"] = len(rows) - int(keep.sum())
        columns, rows = {name: column[keep] for name, column in columns.items()}, rows[keep]
    for name, made in past.columns.items():
        values = np.asarray(np.load(made.file, mmap_mode="r")[rows])
        columns[name] = Column(kind=made.kind, values=values, dictionary=made.dictionary)
    return finish(Related(columns=columns, rows=rows, dropped=dropped), data, layout)


def some_columns(related: Related, names: Sequence[str]) -> tuple[Int64, dict[str, Column]]:
    return related.rows, {name: related.columns[name] for name in names}


def _look_at_all(
    engine: Engine, held: Held, data: DataSpec, layout: Layout, total: int, scratch: Path
) -> Past:
    names = {data.time} | set(data.unique.by if data.unique else ())
    for window in layout.windows:
        names |= {*window.by, *(column.column for column in window.columns.values())}
    wanted = tuple(sorted(name for name in names if name is not None))
    parts = engine.collect(some_columns, held, wanted)
    rows = np.concatenate([own for own, _ in parts])
    columns = {name: joined([own[name] for _, own in parts]) for name in wanted}
    times = None if data.time is None else columns[data.time].values
    kept = None
    if data.unique is not None:
        keep = keep_one(data.unique, columns, times, rows)
        kept = _write(scratch / "kept.npy", np.zeros(total, bool), rows, keep)
        rows = rows[keep]
        columns = {name: column[keep] for name, column in columns.items()}
        times = None if times is None else times[keep]
    made: dict[str, MadeColumn] = {}
    for window in layout.windows:
        assert times is not None
        for name, column in look_back(window, columns, times).items():
            empty = np.full(total, null_of(column.kind), column.values.dtype)
            file = _write(scratch / f"window-{len(made)}.npy", empty, rows, column.values)
            made[name] = MadeColumn(file=file, kind=column.kind, dictionary=column.dictionary)
    return Past(columns=made, kept=kept)


def keep_one(
    unique: UniqueSpec, columns: Mapping[str, Column], times: Int64 | None, rows: Int64
) -> npt.NDArray[np.bool_]:
    """Of rows with equal keys, the first or the last by time; ties by row id; one without a time only if none has."""
    codes = group_codes([columns[name] for name in unique.by])
    if times is None:
        times = np.zeros(len(rows), np.int64)
    elif unique.keep == "first":
        times = np.where(times == INT64_NULL, np.iinfo(np.int64).max, times)
    order = np.lexsort((rows, times, codes))
    edge = codes[order][1:] != codes[order][:-1]
    ends = np.ones(1, bool)
    chosen = np.concatenate([ends, edge] if unique.keep == "first" else [edge, ends])
    keep = np.zeros(len(rows), bool)
    keep[order[chosen[: len(order)]]] = True
    return keep


def _write(file: Path, values: npt.NDArray[np.generic], rows: Int64, own: npt.NDArray[np.generic]) -> str:
    values[rows] = own
    np.save(file, values)
    return str(file)
