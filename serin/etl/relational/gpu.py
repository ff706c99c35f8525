"""Prepares pieces on a GPU, in batches: read there, joined, filtered and given their target there.

cuDF decodes numbers, times and strings on the GPU. Strings become codes into a dictionary there, and only the
dictionary is copied to the host. The host reads every column that cuDF would not read as it does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from serin.columns.column import Column, column_from_arrow
from serin.etl.binding.layout import Layout
from serin.etl.engines.device import to_gpu
from serin.etl.relational.groups import joined
from serin.etl.relational.relation import LoadedJoin, Prepared, Related, finish, relate_columns
from serin.etl.sources.files import open_parquet
from serin.etl.sources.tables import Piece, Read, read_piece
from serin.formats.schema import INT64_NULL
from serin.machine.hardware import core_count
from serin.spec.data import DataSpec

_HOST_ROWS = 2**18  # that a thread reads at a time


def read_on_gpu(pieces: Sequence[Piece], reads: Sequence[Read]) -> dict[str, Column]:
    """The columns of neighbouring pieces, all on the GPU."""
    types = {each.file: _types(each) for each in pieces}
    there = [
        read for read in reads if all(_decodable(own.get(read.name_in_file), read) for own in types.values())
    ]
    columns: dict[str, Column] = {}
    if there and importlib.util.find_spec("cudf") is not None:
        try:
            columns = _decode(pieces, there, types)
        except (OSError, RuntimeError, ValueError):
            columns = {}  # the host can say what is wrong with the file, if anything
    left = tuple(read for read in reads if read.column not in columns)
    return {**columns, **_upload(pieces, left)} if left else columns


def _types(piece: Piece) -> dict[str, pa.DataType]:
    """What the file itself holds; nothing where cuDF is not to read it."""
    if "://" in piece.file.path:
        return {}
    schema = open_parquet(piece.file).schema_arrow
    given = {key for key, _ in piece.file.partition}
    return {name: own for name, own in zip(schema.names, schema.types, strict=True) if name not in given}


def _decodable(arrow: pa.DataType | None, read: Read) -> bool:
    """Whether cuDF gives the values that the host would read."""
    if arrow is None:
        return False
    if read.kind == "string":
        return bool(pa.types.is_string(arrow) or pa.types.is_large_string(arrow))
    if read.kind == "timestamp":
        return bool(pa.types.is_timestamp(arrow) and arrow.unit in ("us", "ns"))
    if pa.types.is_boolean(arrow):
        return read.kind == "bool"
    whole = pa.types.is_integer(arrow) and not pa.types.is_uint64(arrow)
    if read.kind == "int":
        return bool(whole)
    return read.kind == "float" and bool(whole or pa.types.is_float32(arrow) or pa.types.is_float64(arrow))


def _decode(
    pieces: Sequence[Piece], reads: Sequence[Read], types: Mapping[Any, Mapping[str, pa.DataType]]
) -> dict[str, Column]:
    """Decodes columns by cuDF; files whose columns have the same types in one call."""
    import cudf

    names = [read.name_in_file for read in reads]
    parts: dict[str, list[Column]] = {read.column: [] for read in reads}
    for _, own in groupby(pieces, lambda each: [types[each.file][name] for name in names]):
        groups: dict[str, list[int]] = {}
        for each in own:
            groups.setdefault(each.file.path, []).extend(each.groups)
        frame = cudf.read_parquet(
            list(groups),
            columns=names,
            row_groups=list(groups.values()),
            use_pandas_metadata=False,
            dataset_kwargs={"partitioning": None},  # what folders mean is known already
        )
        for read in reads:
            series = frame[read.name_in_file]
            made = _texts(series) if read.kind == "string" else _numbers(series, read)
            parts[read.column].append(made)
            del frame[read.name_in_file], series
    return {name: joined(own) for name, own in parts.items()}


def _texts(series: Any) -> Column:
    """Codes by cuDF's hash of each string, which is compared with the string that its code stands for: ValueError
    where two strings have the same hash."""
    import cupy

    hashes = series.hash_values(method="xxhash64").values
    _, first, codes = cupy.unique(hashes, return_index=True, return_inverse=True)
    entries = series.take(first).reset_index(drop=True)
    spread = entries.take(codes).reset_index(drop=True)
    same = (series == spread).fillna(value=True).all() and (series.isna() == spread.isna()).all()
    if not same:
        raise ValueError("two strings have the same hash")
    texts = entries.to_arrow().cast(pa.string())
    known = column_from_arrow(
        pa.DictionaryArray.from_arrays(np.arange(len(texts), dtype=np.int32), texts), "string"
    )
    return Column(
        kind="string", values=cupy.asarray(known.values)[codes.astype(np.int32)], dictionary=known.dictionary
    )


def _numbers(series: Any, read: Read) -> Column:
    """The column that `column_from_arrow` would make, from a cuDF column."""
    import cupy

    scale = 1000 if str(series.dtype).startswith("datetime64[ns") else 1
    if read.kind in ("bool", "timestamp"):
        series = series.astype("int8" if read.kind == "bool" else "int64")
    missing: Any = np.int8(-1)
    null = series.isna().values if series.has_nulls else None
    values = (series if null is None else series.fillna(0)).values
    if read.kind == "float":
        missing = np.float64("nan")
        if values.dtype.kind != "f":  # as the host does: by way of float64
            values = values.astype(np.float64)
            read = replace(read, exact=False)
        if not (read.exact and values.dtype == np.float64):
            values, missing = values.astype(np.float32, copy=False), np.float32("nan")
    elif read.kind in ("int", "timestamp"):
        values, missing = values.astype(np.int64, copy=False), np.int64(INT64_NULL)
        values = values // scale if scale > 1 else values
    return Column(kind=read.kind, values=values if null is None else cupy.where(null, missing, values))


def _upload(pieces: Sequence[Piece], reads: tuple[Read, ...]) -> dict[str, Column]:
    """Columns that the host reads in threads and copies to the GPU."""
    small = [part for each in pieces for part in host_parts(each)]
    with ThreadPoolExecutor(core_count(), thread_name_prefix="to-gpu") as pool:
        parts = list(pool.map(lambda part: read_piece(part, reads), small))
    return {read.column: joined([to_gpu(part.pop(read.column)) for part in parts]) for read in reads}


def host_parts(piece: Piece) -> Iterator[Piece]:
    """The piece cut into parts that one host thread reads; small row groups are read together."""
    if piece.rows <= _HOST_ROWS:
        yield piece
        return
    sizes = open_parquet(piece.file).metadata
    first, groups, rows = piece.first_row, [], 0
    for group in piece.groups:
        groups.append(group)
        rows += sizes.row_group(group).num_rows
        if rows >= _HOST_ROWS or group == piece.groups[-1]:
            yield replace(piece, groups=tuple(groups), first_row=first, rows=rows)
            first, groups, rows = first + rows, [], 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBatch:
    """Neighbouring pieces, of one file or of several, that a GPU works on as one."""

    pieces: tuple[Piece, ...]

    @property
    def first_row(self) -> int:
        return self.pieces[0].first_row

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


def gpu_batches(pieces: Sequence[Piece], rows: int) -> list[GpuBatch]:
    """The pieces, in order, in batches of at most `rows` rows; a piece is never cut."""
    batches: list[list[Piece]] = []
    for piece in pieces:
        if batches and sum(each.rows for each in batches[-1]) + piece.rows <= rows:
            batches[-1].append(piece)
        else:
            batches.append([piece])
    return [GpuBatch(pieces=tuple(own)) for own in batches]


def prepare_on_gpu(batch: GpuBatch, data: DataSpec, layout: Layout, joins: Sequence[LoadedJoin]) -> Prepared:
    """The result of `prepare` for the pieces, on the GPU; MemoryError when it is too small for them."""
    return finish(relate_on_gpu(batch, layout, joins), data, layout)


def relate_on_gpu(batch: GpuBatch, layout: Layout, joins: Sequence[LoadedJoin]) -> Related:
    """The result of `relate` for the pieces, on the GPU."""
    import cupy

    columns = read_on_gpu(batch.pieces, layout.reads)
    rows = cupy.arange(batch.first_row, batch.first_row + batch.rows, dtype=np.int64)
    return relate_columns(columns, rows, layout, joins)
