"""Operations that need rows of other pieces: de-duplication and rolling windows.

Keys, times and values of all rows are collected here, one part of the keys at a time when memory is short, and worked
on by this process's GPU when the engine has one. The results are files with one value per row of the main table, which
every piece maps into memory. The result does not depend on pieces, parts or engine.

A window ends before the row's own time (less its delay): rows of the same moment never see each other. Sums are exact
integers, whatever the values, and rounded once: they depend on the rows of the window alone.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.column import Column, any_true, array_module, beside, count_true, on_host, take
from serin.columns.exact import Limb, Superaccumulator, limbs, nearest_ratios
from serin.errors import ColumnUnusable
from serin.etl.binding.layout import Layout
from serin.etl.engines.device import gpu_aware
from serin.etl.engines.engine import Engine, Held
from serin.etl.engines.memory_budget import available_bytes
from serin.etl.relational.groups import Int64, Timeline, group_codes, joined, key_hashes, with_dictionary
from serin.etl.relational.relation import Prepared, Related, finish
from serin.etl.sources.tables import Piece
from serin.formats.nulls import null_of
from serin.formats.schema import INT64_NULL, Kind
from serin.spec.data import DataSpec
from serin.spec.relation import UniqueSpec, WindowColumn, WindowSpec

_US = 1_000_000
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
        kept = None if self.data.unique is None else self.unique(self.data.unique)
        made: dict[str, MadeColumn] = {}
        for window in layout.windows:
            made |= self.window(window, layout.kinds, kept)
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
        self, window: WindowSpec, kinds: Mapping[str, Kind], kept: str | None
    ) -> dict[str, MadeColumn]:
        """One file for each column of the window."""
        time = self.data.time
        assert time is not None
        read = [column.column for column in window.columns.values() if column.column is not None]
        names = tuple(dict.fromkeys([*window.by, time, *read]))
        texts = {name: self._texts(name) for name in names if kinds[name] == "string"}
        made: dict[str, MadeColumn] = {}
        files: dict[str, Any] = {}
        for part in self.parts():
            rows, columns = self.columns(names, window.by, part, kept)
            columns |= {name: with_dictionary(columns[name], texts[name]) for name in texts}
            for name, column in self.engine.compute(look_back, window, columns, columns[time].values).items():
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


def look_back(spec: WindowSpec, columns: Mapping[str, Column], times: Int64) -> dict[str, Column]:
    """The window's columns for all rows. Rows with a null in the key or in the time get nulls. DataError when a sum of
    integers does not fit in 64 bits."""
    xp, known = array_module(times), times != INT64_NULL
    for key in spec.by:
        known &= ~columns[key].null
    rows = np.flatnonzero(known)
    groups, moments = group_codes([columns[key][rows] for key in spec.by]), times[rows]
    line = Timeline(groups, moments)
    ends = moments - round(spec.delay * _US)
    stop = line.before(groups, ends)
    start = line.starts(groups)
    stop = np.maximum(stop, start)
    if spec.span is not None:
        start = np.minimum(np.maximum(start, line.before(groups, ends - round(spec.span * _US))), stop)
    elif spec.rows is not None:
        start = np.maximum(start, stop - spec.rows)
    window = _Window(start=start, stop=stop, first=line.starts(groups))
    place = xp.full(len(times), -1, np.int64)
    place[rows] = xp.arange(len(rows))
    made = {}
    for name, asked in spec.columns.items():
        past = None if asked.column is None else columns[asked.column][rows][line.order]
        try:
            result = window.column(asked, past)
        except OverflowError as error:
            raise ColumnUnusable(
                column=name,
                problem=f"window column {name!r}: a sum of {asked.column!r} does not fit in 64 bits; use mean, or a "
                "shorter window",
            ) from error
        made[name] = result.take_or_null(place)
    return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Window:
    """For each row the part start .. stop of the ordered past; its group begins at `first`."""

    start: Int64
    stop: Int64
    first: Int64

    @property
    def _longest(self) -> int:
        return int((self.stop - self.start).max()) if len(self.start) else 0

    def column(self, asked: WindowColumn, past: Column | None) -> Column:
        if asked.function == "lag":
            assert past is not None
            at = self.stop - asked.back
            return past.take_or_null(np.where(at >= self.first, at, np.int64(-1)))
        if past is None:
            return Column(kind="int", values=self.stop - self.start)
        usable = ~past.null
        if past.kind == "float":
            usable &= np.isfinite(past.values)
        count = self._sum(usable.astype(np.int64))
        if asked.function == "count":
            return Column(kind="int", values=count)
        if asked.function in ("sum", "mean"):
            return self._total(asked.function, past, usable, count)
        return self._extreme(asked.function, past, usable, count)

    def _sum(self, values: Int64) -> Int64:
        """Exact when the result fits, whatever the running sum did in between: int64 wraps both ways."""
        xp = array_module(values)
        running = xp.concatenate([xp.zeros(1, np.int64), xp.cumsum(values, dtype=np.int64)])
        sums: Int64 = running[self.stop] - running[self.start]
        return sums

    def _total(self, function: str, past: Column, usable: npt.NDArray[np.bool_], count: Int64) -> Column:
        dtype = np.float32 if past.kind == "float" else np.int64
        values = np.where(usable, past.values, dtype(0)).astype(dtype, copy=False)
        parts = limbs(values, most_bits=62 - self._longest.bit_length())
        sums = [
            Limb(part.exponent, on_host(self._sum(part.digits.astype(np.int64, copy=False))))
            for part in parts
        ]
        counts = on_host(count)  # which also rounds: a GPU would flush subnormal results
        none = counts == 0
        if function == "sum" and past.kind != "float":
            made: Any = np.where(none, INT64_NULL, _to_int64(sums, counts.shape))
            return Column(kind="int", values=beside(made, values))
        divisor = np.maximum(counts, 1) if function == "mean" else np.ones_like(counts)
        made = np.where(none, np.float32("nan"), nearest_ratios(sums, divisor))
        return Column(kind="float", values=beside(made, values))

    def _extreme(self, function: str, past: Column, usable: npt.NDArray[np.bool_], count: Int64) -> Column:
        values, xp = past.values, array_module(past.values)
        if values.dtype.kind == "f":
            worst: float = np.inf if function == "min" else -np.inf
        else:
            limits = np.iinfo(values.dtype)
            worst = limits.max if function == "min" else limits.min
        level = np.where(usable, values, values.dtype.type(worst))
        best: Callable[..., npt.NDArray[np.generic]] = np.minimum if function == "min" else np.maximum
        found = xp.full(len(self.start), worst, values.dtype)
        length = self.stop - self.start
        width = 1
        while len(level) and width <= self._longest:
            # Two stretches of `width` rows, which overlap, cover every window of up to twice that length.
            own = np.flatnonzero((length >= width) & (length < 2 * width))
            found[own] = best(level[self.start[own]], level[self.stop[own] - width])
            level = best(level[:-width], level[width:]) if len(level) > width else level[:0]
            width *= 2
        kept = np.where(count == 0, np.int64(-1), xp.arange(len(found)))
        return Column(kind=past.kind, values=found).take_or_null(kept)


def _to_int64(sums: Sequence[Limb], shape: tuple[int, ...]) -> Int64:
    """OverflowError when one does not fit, or is the int64 that means null."""
    if len(sums) == 1:
        return np.asarray(sums[0].digits)
    whole = Superaccumulator.of(sums, shape).to_int64()
    if any_true(whole == INT64_NULL):
        raise OverflowError
    return whole
