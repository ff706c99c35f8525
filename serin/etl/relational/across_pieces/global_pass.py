"""Operations that need rows of other pieces: de-duplication and rolling windows.

Keys, times and values of all rows are collected here, one part of the keys at a time when memory is short, and worked
on by this process's GPU when the engine has one. The results are files with one value per row of the main table, which
every piece maps into memory. The result does not depend on pieces, parts or engine.

`rolling.py` computes the windows, `arrivals.py` those that are also computed while the model is served.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Column, array_module, beside, count_true, on_host, take
from serin.etl.binding.layout import Layout
from serin.etl.engines.device import gpu_aware
from serin.etl.engines.engine import Engine, Held
from serin.etl.engines.memory_budget import available_bytes
from serin.etl.relational.across_pieces.arrivals import History, arrivals, look_back_online
from serin.etl.relational.across_pieces.rolling import look_back
from serin.etl.relational.groups import Int64, group_codes, joined, key_hashes, with_dictionary
from serin.etl.relational.relation import Prepared, Related, finish
from serin.etl.sources.tables import Piece
from serin.formats.nulls import null_of
from serin.formats.schema import INT64_NULL, Kind
from serin.formats.windows import HISTORY
from serin.spec.data import DataSpec
from serin.spec.relation import UniqueSpec, WindowSpec

ROW_BYTES = 200  # of a row during the pass: keys, times, values, their order and the results


class Part(NamedTuple):
    """The rows whose keys' hash, divided by `parts`, leaves `number`."""

    number: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MadeColumn:
    file: str  # one value per row of the main table
    kind: Kind
    dictionary: pa.Array | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassResult:
    """`kept`: path of a boolean file, one value per row of the main table; None keeps all rows."""

    columns: Mapping[str, MadeColumn]
    kept: str | None


def finish_with_global_pass(
    engine: Engine, held: Held, pieces: Sequence[Piece], data: DataSpec, layout: Layout, scratch: Path
) -> Held:
    """The related pieces that the engine holds, after de-duplication and windows, finished."""
    total = max(piece.first_row + piece.rows for piece in pieces)
    found = _GlobalPass(engine=engine, held=held, data=data, total=total, scratch=scratch).run(layout)
    return engine.then(finish_piece, held, data, layout, found)


@gpu_aware
def finish_piece(related: Related, data: DataSpec, layout: Layout, found: PassResult) -> Prepared:
    """What `finish` returns for the piece without duplicates and with its window columns."""
    columns, rows, dropped = dict(related.columns), related.rows, dict(related.dropped)
    if found.kept is not None:
        keep = _values_of(found.kept, rows)
        dropped["duplicate"] = len(rows) - count_true(keep)
        columns, rows = take(columns, keep), rows[keep]
    for name, made in found.columns.items():
        values = _values_of(made.file, rows)
        columns[name] = Column(kind=made.kind, values=values, dictionary=made.dictionary)
    return finish(Related(columns=columns, rows=rows, dropped=dropped), data, layout)


def _values_of(file: str, rows: Int64) -> Any:
    """The values of these rows, where the rows are."""
    return beside(np.asarray(np.load(file, mmap_mode="r")[on_host(rows)]), rows)


@gpu_aware
def some_columns(
    related: Related, names: Sequence[str], by: Sequence[str], part: Part, kept: str | None
) -> tuple[Int64, dict[str, Column]]:
    """The rows of this piece that stay and whose keys belong to the part, with these columns, on the host."""
    rows, columns = related.rows, {name: related.columns[name] for name in (*names, *by)}
    if kept is not None or part.parts > 1:
        chosen = array_module(rows).ones(len(rows), bool) if kept is None else _values_of(kept, rows)
        if part.parts > 1:
            keys = [columns[name] for name in by]
            chosen &= key_hashes(keys) % part.parts == part.number if keys else part.number == 0
        rows, columns = rows[chosen], take(columns, chosen)
    return on_host(rows), {name: columns[name].on_host() for name in names}


@gpu_aware
def texts_of(related: Related, name: str) -> pa.Array:
    return related.columns[name].dictionary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _GlobalPass:
    """A pass over all rows, one part of the keys at a time, so that each part fits into memory."""

    engine: Engine
    held: Held
    data: DataSpec
    total: int
    scratch: Path

    def run(self, layout: Layout) -> PassResult:
        shutil.rmtree(self.scratch / HISTORY, ignore_errors=True)  # of an attempt that ran out of memory
        kept = None if self.data.unique is None else self.unique(self.data.unique)
        made: dict[str, MadeColumn] = {}
        asked = {column.name for column in layout.inputs}
        for window in layout.windows:
            history = History(window) if window.source == "online" and asked & set(window.make) else None
            made |= self.window(window, layout.kinds, kept, history)
            if history is not None:
                history.write_next(self.scratch / HISTORY)
        return PassResult(columns=made, kept=kept)

    def parts(self) -> list[Part]:
        number = max(1, -(-self.total * ROW_BYTES // max(available_bytes() // 4, 1)))
        return [Part(each, number) for each in range(number)]

    def columns(
        self, names: Sequence[str], by: Sequence[str], part: Part, kept: str | None
    ) -> tuple[Int64, dict[str, Column]]:
        parts = self.engine.collect(some_columns, self.held, tuple(names), tuple(by), part, kept)
        rows = np.concatenate([own for own, _ in parts])
        return rows, {name: joined([own[name] for _, own in parts]) for name in names}

    def unique(self, unique: UniqueSpec) -> str:
        """The path of a boolean file: which rows stay."""
        file = self._new_file()
        kept = np.lib.format.open_memmap(file, mode="w+", dtype=np.bool_, shape=(self.total,))
        time = self.data.time
        for part in self.parts():
            names = dict.fromkeys([*unique.by, *([time] if time else [])])
            rows, columns = self.columns(tuple(names), unique.by, part, None)
            times = columns[time].values if time else None
            kept[rows] = self.engine.compute(keep_one, unique, columns, times, rows)
        kept.flush()
        return str(file)

    def window(
        self, window: WindowSpec, kinds: Mapping[str, Kind], kept: str | None, history: History | None
    ) -> dict[str, MadeColumn]:
        """One file for each column of the window."""
        time = self.data.time
        assert time is not None
        read = [column.column for column in window.columns.values() if column.column is not None]
        events = self.data.events if window.source == "online" else None
        named = [each for each in (events.id, events.arrival) if each is not None] if events else []
        names = tuple(dict.fromkeys([*window.by, time, *read, *named]))
        texts = {name: self._texts(name) for name in names if kinds[name] == "string"}
        made: dict[str, MadeColumn] = {}
        files: dict[str, Any] = {}
        for part in self.parts():
            rows, columns = self.columns(names, window.by, part, kept)
            columns |= {name: with_dictionary(columns[name], texts[name]) for name in texts}
            times = columns[time].values
            if events is None:
                found = self.engine.compute(look_back, window, columns, times)
            else:
                found = look_back_online(window, events, columns, times)
                if history is not None:
                    history.add(columns, found, rows, arrivals(events, columns, times))
            for name, column in found.items():
                if name not in made:
                    file = self._new_file()
                    made[name] = MadeColumn(file=str(file), kind=column.kind, dictionary=column.dictionary)
                    dtype = column.values.dtype
                    files[name] = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=(self.total,))
                    files[name][:] = null_of(column.kind)
                files[name][rows] = column.values
        for file in files.values():
            file.flush()
        return made

    def _new_file(self) -> Path:
        return self.scratch / f"{uuid.uuid4().hex}.npy"  # a new name: a piece may still map an older file

    def _texts(self, name: str) -> pa.Array:
        """Every text of a column, each once."""
        return pc.unique(pa.concat_arrays(self.engine.collect(texts_of, self.held, name)))


def keep_one(
    unique: UniqueSpec, columns: Mapping[str, Column], times: Int64 | None, rows: Int64
) -> npt.NDArray[np.bool_]:
    """Of rows with equal keys, the first or the last by time; ties by row id; one without a time only if none has."""
    xp = array_module(rows)
    codes = group_codes([columns[name] for name in unique.by])
    if times is None:
        times = xp.zeros(len(rows), np.int64)
    elif unique.keep == "first":
        times = np.where(times == INT64_NULL, np.int64(np.iinfo(np.int64).max), times)
    order = xp.lexsort(xp.stack([rows, times, codes]))
    edge = codes[order][1:] != codes[order][:-1]
    ends = xp.ones(1, bool)
    chosen = xp.concatenate([ends, edge] if unique.keep == "first" else [edge, ends])
    keep: npt.NDArray[np.bool_] = xp.zeros(len(rows), bool)
    keep[order[chosen[: len(order)]]] = True
    return keep
