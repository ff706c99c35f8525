"""Prepares pieces on a GPU, in batches: read there, joined, filtered and given their target there.

cuDF decodes numbers, times and strings on the GPU. Strings become codes into a dictionary there, and only the
dictionary is copied to the host. The host reads every column that cuDF would not read as it does.

Of cuDF only its lower layer is imported, pylibcudf: its data frames take seconds to import.
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

from serin.columns.column import Column, any_true, column_from_arrow
from serin.etl.binding.layout import Layout
from serin.etl.engines.device import to_gpu
from serin.etl.relational.groups import joined
from serin.etl.relational.relation import LoadedJoin, Prepared, Related, finish, relate_columns
from serin.etl.sources.files import open_parquet
from serin.etl.sources.tables import Piece, Read, read_piece
from serin.formats.schema import INT64_NULL
from serin.machine.hardware import core_count
from serin.spec.data import DataSpec

_DTYPES = {"BOOL8": "int8", "TIMESTAMP_MICROSECONDS": "int64", "TIMESTAMP_NANOSECONDS": "int64"}
_HOST_ROWS = 2**18  # that a thread reads at a time


def read_on_gpu(pieces: Sequence[Piece], reads: Sequence[Read]) -> dict[str, Column]:
    """The columns of neighbouring pieces, all on the GPU."""
    types = {each.file: _types(each) for each in pieces}
    there = [
        read for read in reads if all(_decodable(own.get(read.name_in_file), read) for own in types.values())
    ]
    columns: dict[str, Column] = {}
    if there and importlib.util.find_spec("pylibcudf") is not None:
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
    import pylibcudf

    names = [read.name_in_file for read in reads]
    parts: dict[str, list[Column]] = {read.column: [] for read in reads}
    for _, own in groupby(pieces, lambda each: [types[each.file][name] for name in names]):
        groups: dict[str, list[int]] = {}
        for each in own:
            groups.setdefault(each.file.path, []).extend(each.groups)
        files = pylibcudf.io.SourceInfo(list(groups))
        options = pylibcudf.io.parquet.ParquetReaderOptions.builder(files).use_pandas_metadata(False).build()
        options.set_row_groups(list(groups.values()))
        options.set_column_names(names)
        decoded = pylibcudf.io.parquet.read_parquet(options)
        columns = dict(zip(decoded.column_names(), decoded.tbl.release(), strict=True))
        del decoded
        for read in reads:
            column = columns.pop(read.name_in_file)
            parts[read.column].append(_texts(column) if read.kind == "string" else _numbers(column, read))
            del column
    return {name: joined(own) for name, own in parts.items()}


def _texts(column: Any) -> Column:
    """Codes by cuDF's hash of each string, which is compared with the string that its code stands for: ValueError
    where two strings have the same hash."""
    import cupy
    import pylibcudf

    hashes = _values(pylibcudf.hashing.xxhash_64(pylibcudf.Table([column])))
    _, first, codes = cupy.unique(hashes, return_index=True, return_inverse=True)
    entries = _take(column, first)
    spread = _take(entries, codes)
    equal = pylibcudf.binaryop.binary_operation(
        column,
        spread,
        pylibcudf.binaryop.BinaryOperator.NULL_EQUALS,
        pylibcudf.DataType(pylibcudf.TypeId.BOOL8),
    )
    if any_true(_values(equal) == 0):
        raise ValueError("two strings have the same hash")
    del spread, equal
    texts = entries.to_arrow().cast(pa.string())
    known = column_from_arrow(
        pa.DictionaryArray.from_arrays(np.arange(len(texts), dtype=np.int32), texts), "string"
    )
    return Column(
        kind="string", values=cupy.asarray(known.values)[codes.astype(np.int32)], dictionary=known.dictionary
    )


def _take(column: Any, rows: Any) -> Any:
    import pylibcudf

    numbers = pylibcudf.Column.from_cuda_array_interface(rows.astype(np.int32, copy=False))
    unchecked = pylibcudf.copying.OutOfBoundsPolicy.DONT_CHECK
    return pylibcudf.copying.gather(pylibcudf.Table([column]), numbers, unchecked).columns()[0]


def _numbers(column: Any, read: Read) -> Column:
    """The column that `column_from_arrow` would make, from a cuDF column."""
    import cupy
    import pylibcudf

    scale = 1000 if column.type().id() == pylibcudf.TypeId.TIMESTAMP_NANOSECONDS else 1
    missing: Any = np.int8(-1)
    null = _values(pylibcudf.unary.is_null(column)).view(np.bool_) if column.null_count() else None
    values = _values(column)  # anything where they are null
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


def _values(column: Any) -> Any:
    """A cuDF column as an array in the same memory: booleans as int8, times as int64; nulls are not marked."""
    import cupy

    dtype = np.dtype(_DTYPES.get(column.type().id().name, column.type().id().name.lower()))
    data = column.data()
    if data is None:  # no rows
        return cupy.empty(0, dtype)
    memory = cupy.cuda.UnownedMemory(data.ptr, data.size, column)
    pointer = cupy.cuda.MemoryPointer(memory, column.offset() * dtype.itemsize)
    return cupy.ndarray((column.size(),), dtype, pointer)


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
