"""Columns that are not in a file but belong to its folders (month=07/part.parquet) or to its snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from serin.columns.column import Column, column_from_arrow
from serin.errors import SourceUnreadable
from serin.formats.dataset import SourceFile
from serin.formats.schema import Kind

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
        whole = all(value == NULL or value.lstrip("-").isdigit() for value in values)
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
