"""A table as the ETL reads it: Parquet files with a common set of columns, cut into pieces of whole row groups.

Some columns are not in a file but belong to its folders (month=07/part.parquet) or to its snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from serin.columns.column import Column, column_from_arrow, kind_of_type
from serin.errors import ColumnUnusable, SourceUnreadable, TableEmpty, TimeUnparsable
from serin.etl.sources.convert import convert, decided, is_undecided, types_of
from serin.etl.sources.file_cache import FileCache, conversion_of
from serin.etl.sources.files import (
    file_format,
    find_files,
    local_copy,
    open_parquet,
    origin_of,
)
from serin.etl.sources.malformed import odd_text
from serin.formats.dataset import SourceFile
from serin.formats.schema import Kind
from serin.machine.hardware import core_count
from serin.store.file_systems import reason_of, remote_errors

OTHER = "other"  # the kind of a declared column that nothing can be made of
NULL = "__HIVE_DEFAULT_PARTITION__"
_TYPE_OF_KIND = {
    "string": pa.string(),
    "float": pa.float64(),
    "int": pa.int64(),
    "timestamp": pa.timestamp("us"),
    "bool": pa.bool_(),
    OTHER: pa.binary(),
}
_CONVERTED_AT_ONCE = 4  # each with its blocks in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A column to be read. `exact` keeps float64, for targets; features are float32. `stored`: its name in the files,
    when `data.rename` gives it another."""

    column: str
    kind: Kind
    exact: bool = False
    stored: str | None = None

    @property
    def name_in_file(self) -> str:
        return self.column if self.stored is None else self.stored


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    file: SourceFile
    index: int
    first_row: int  # position in the table
    rows: int
    bytes: int  # unpacked


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """`stored`: the names in the files of columns that are renamed, by the names in `types`."""

    name: str
    types: Mapping[str, pa.DataType]
    groups: tuple[RowGroup, ...]
    stored: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)

    def name_in_file(self, column: str) -> str:
        return self.stored.get(column, column)

    def read(self, column: str, kind: Kind, *, exact: bool = False) -> Read:
        return Read(column=column, kind=kind, exact=exact, stored=self.stored.get(column))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighbouring row groups of one file."""

    file: SourceFile
    groups: tuple[int, ...]
    first_row: int
    rows: int


def open_table(name: str, files: Sequence[SourceFile], scratch: Path, kept: FileCache | None = None) -> Table:
    """Returns the table's columns and row groups, from the files' footers.

    Other formats than Parquet are converted first: into `kept`, where the next build finds them, else into `scratch`.

    All files have the same columns. Where one has integers and another floats, the column is float; a
    column that holds nothing in one file has its type from the others.
    """
    types: dict[str, pa.DataType] = {}
    undecided: set[str] = set()
    groups: list[RowGroup] = []
    first_row = 0
    folders = partition_types(files)
    for number, (given, file) in enumerate(zip(files, _as_parquet(name, files, scratch, kept), strict=True)):
        footer = open_parquet(file)
        schema = footer.schema_arrow
        twice = [name for name in schema.names if schema.names.count(name) > 1]
        if twice:
            reason = f"two columns are called {twice[0]!r}; rename one of them"
            raise SourceUnreadable(table=name, path=given.path, reason=reason)
        undecided |= {field.name for field in schema if is_undecided(field)}
        file = with_declared(file, schema.names)
        own = types_of(schema) | folders if not file.declared else declared_types(file, types_of(schema))
        types = _common(types, own, file, files[number - 1].path if number else "")
        for index in range(footer.metadata.num_row_groups):
            group = footer.metadata.row_group(index)
            groups.append(
                RowGroup(
                    file=file,
                    index=index,
                    first_row=first_row,
                    rows=group.num_rows,
                    bytes=group.total_byte_size,
                )
            )
            first_row += group.num_rows
    if first_row == 0:
        raise TableEmpty(table=name, why=f"{files[0].path} holds none")
    filled = tuple(group for group in groups if group.rows)
    return Table(name=name, types=decided(types, undecided), groups=filled)


def cut(table: Table, piece_rows: int) -> list[Piece]:
    """The table in pieces of about `piece_rows` rows, in order; a row group is never cut."""
    pieces: list[list[RowGroup]] = []
    for group in table.groups:
        last = pieces[-1] if pieces else []
        if last and last[0].file == group.file and sum(each.rows for each in last) + group.rows <= piece_rows:
            last.append(group)
        else:
            pieces.append([group])
    return [
        Piece(
            file=groups[0].file,
            groups=tuple(group.index for group in groups),
            first_row=groups[0].first_row,
            rows=sum(group.rows for group in groups),
        )
        for groups in pieces
    ]


def spread_pieces(table: Table, rows: int) -> list[Piece]:
    """Row groups of about `rows` rows together, spread evenly over the table; all of them when it has no more."""
    groups = table.groups
    if table.rows > rows:
        count = max(1, rows * len(groups) // table.rows)
        chosen = (np.arange(count) * 2 + 1) * len(groups) // (2 * count)
        groups = tuple(groups[place] for place in chosen)
    return [
        Piece(file=group.file, groups=(group.index,), first_row=group.first_row, rows=group.rows)
        for group in groups
    ]


def read_piece(piece: Piece, reads: Iterable[Read]) -> dict[str, Column]:
    """The columns of a piece. Text is read as codes into a dictionary; DataError names what does not fit its kind."""
    constants, wanted = split_reads(piece.file, tuple(reads), piece.rows)
    texts = [read.name_in_file for read in wanted if read.kind in ("string", "timestamp")]
    file = open_parquet(piece.file, texts)
    try:
        table = file.read_row_groups(
            list(piece.groups), columns=[read.name_in_file for read in wanted], use_threads=False
        )
    except remote_errors(OSError, pa.ArrowException) as error:
        rows = (
            f"rows {piece.first_row} to {piece.first_row + piece.rows - 1} of the table: {reason_of(error)}"
        )
        path = origin_of(piece.file).path
        raise SourceUnreadable(table=piece.file.table, path=path, reason=rows) from error
    return constants | {read.column: _column(table, read, piece) for read in wanted}


def _column(table: pa.Table, read: Read, piece: Piece) -> Column:
    values = table.column(read.name_in_file)
    if read.kind != "string" and is_undecided(table.schema.field(read.name_in_file)):
        return column_from_arrow(pa.nulls(len(values)), read.kind)
    if read.exact and pa.types.is_float64(values.type):
        combined = values.combine_chunks() if values.num_chunks else pa.array([], pa.float64())
        return Column(kind="float", values=combined.to_numpy(zero_copy_only=False))
    try:
        return column_from_arrow(values, read.kind)
    except (pa.ArrowException, ValueError) as error:
        if read.kind == "timestamp":
            raise _unparsable(values, read.name_in_file, piece) from error
        path = origin_of(piece.file).path
        raise ColumnUnusable(
            column=read.column,
            problem=f"{path} (table {piece.file.table!r}): column {read.name_in_file!r} is not a valid {read.kind}: "
            f"{error}",
        ) from error


def _unparsable(values: pa.ChunkedArray, column: str, piece: Piece) -> TimeUnparsable:
    plain = values.cast(values.type.value_type) if pa.types.is_dictionary(values.type) else values
    path = origin_of(piece.file).path
    for row, text in enumerate(plain.to_pylist()):
        try:
            column_from_arrow(pa.array([text]), "timestamp")
        except (pa.ArrowException, ValueError):
            return TimeUnparsable(column=column, example=str(text), path=path, row=piece.first_row + row)
    return TimeUnparsable(column=column, example="some values name a zone and some do not", path=path)


def _as_parquet(
    name: str, files: Sequence[SourceFile], scratch: Path, kept: FileCache | None
) -> Iterator[SourceFile]:
    """The files, or what they were converted to, in order; a few are converted at a time."""

    def parquet(numbered: tuple[int, SourceFile]) -> SourceFile:
        number, file = numbered
        if file_format(file) in ("parquet", None):
            return file
        if kept is not None and file.content and kept.usable():
            make = partial(_convert_whole, file, kept.digests)
            return local_copy(kept.file(conversion_of(file), make), file)
        target = scratch / f"{name}-{number}.parquet"
        convert(file, target)
        return local_copy(target, file)

    with ThreadPoolExecutor(min(_CONVERTED_AT_ONCE, core_count())) as threads:
        yield from threads.map(parquet, enumerate(files))


def _convert_whole(file: SourceFile, digests: Path, target: Path) -> None:
    """What is kept must be of the file as it was found, and of nothing that came after."""
    convert(file, target)
    refuse_changed([file], find_files(file.table, file.path, digests))


def refuse_changed(files: Iterable[SourceFile], now: Iterable[SourceFile]) -> None:
    """SourceUnreadable for a file that is not what it was when it was found, or is gone."""
    contents = {file.path: file.content for file in now}
    for file in files:
        if file.content and contents.get(file.path) != file.content:
            reason = "it changed while it was read; run again when it is whole"
            raise SourceUnreadable(table=file.table, path=file.path, reason=reason)


def _common(
    left: dict[str, pa.DataType], right: dict[str, pa.DataType], file: SourceFile, before: str
) -> dict[str, pa.DataType]:
    """The columns, each with a type that holds what every file has."""
    if not left:
        return right
    odd = [name for name in (*left, *right) if (name in left) != (name in right)]
    if odd:
        here = origin_of(file).path
        has, lacks = (here, before) if odd[0] in right else (before, here)
        reason = (
            f"column {odd[0]!r} is in {has} and not in {lacks}; give all files of a table the same columns, "
            "or name fewer files"
        )
        raise SourceUnreadable(table=file.table, path=here, reason=reason)
    return {name: _wider(name, left[name], right[name], file) for name in left}


def _wider(name: str, left: pa.DataType, right: pa.DataType, file: SourceFile) -> pa.DataType:
    kinds = {kind_of_type(left), kind_of_type(right)}
    if pa.types.is_null(right) or (len(kinds) == 1 and not pa.types.is_null(left)):
        return left
    if pa.types.is_null(left):
        return right
    if kinds == {"int", "float"}:
        return pa.float64()
    why = odd_text(file, name)
    raise SourceUnreadable(
        table=file.table,
        path=origin_of(file).path,
        reason=f"column {name!r} is {right} here and {left} in the files before{f' ({why})' if why else ''}; "
        "give all files of a table the same types",
    )


def partition_types(files: Sequence[SourceFile]) -> dict[str, pa.DataType]:
    """Returns integers if every folder's value is one, else strings. All files must have folders with the same keys.
    Nothing for the files of a snapshot, which declares its types."""
    if files[0].declared:
        return {}
    keys = [key for key, _ in files[0].partition]
    for file in files:
        own = [key for key, _ in file.partition]
        if own != keys:
            raise SourceUnreadable(
                table=file.table,
                path=file.path,
                reason=f"it is in folders that name {own or 'no key'}, and {files[0].path} in ones that name "
                f"{keys or 'none'}; lay all files of a table out alike",
            )
    types = {}
    for place, key in enumerate(keys):
        values = [file.partition[place][1] for file in files]
        whole = all(value == NULL or re.fullmatch("-?[0-9]+", value) for value in values)
        types[key] = pa.int64() if whole else pa.string()
    return types


def with_declared(file: SourceFile, known: Iterable[str]) -> SourceFile:
    """The file, with nulls for the columns that its table has and neither it (`known`) nor its partition does: it was
    written before they were added."""
    has = {*known, *(key for key, _ in file.partition)}
    lacking = tuple((name, NULL) for name, _ in file.declared if name not in has)
    return replace(file, partition=(*file.partition, *lacking)) if lacking else file


def declared_types(file: SourceFile, stored: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The columns of a file whose table lists its columns: as they are stored, else as they are declared."""
    constant = dict(file.partition)
    return {name: _TYPE_OF_KIND[kind] if name in constant else stored[name] for name, kind in file.declared}


def split_reads(
    file: SourceFile, reads: Sequence[Read], rows: int
) -> tuple[dict[str, Column], tuple[Read, ...]]:
    """The columns that the file's folders give, and what is to be read from the file itself."""
    values = dict(file.partition)
    given = {
        read.column: _constant(values[read.name_in_file], read.kind, rows)
        for read in reads
        if read.name_in_file in values
    }
    return given, tuple(read for read in reads if read.name_in_file not in values)


def _constant(text: str, kind: Kind, rows: int) -> Column:
    value = pa.array([None if text == NULL else text], pa.string())
    if kind in ("int", "float", "bool"):
        value = value.cast({"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}[kind])
    return column_from_arrow(value, kind)[np.zeros(rows, np.intp)]
