"""Reads CSV files, packed or not.

Types are inferred from the file's beginning. From all of it when the beginning says nothing about a column, or when a
later value does not fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from serin.etl.sources.arrow2parquet import Write
from serin.etl.sources.files import compression_of, open_file
from serin.etl.sources.malformed import refuse_open_quote
from serin.etl.sources.undecided import undecided_field
from serin.formats.csv_values import (
    FALSE_WORDS,
    TRUE_WORDS,
    convert_options,
    is_null_word,
    parse_options,
)
from serin.formats.dataset import SourceFile

_BLOCK_BYTES = 16 * 2**20
_CANDIDATES = (
    pa.int64(),
    pa.float64(),
    pa.bool_(),
    pa.timestamp("us"),
    pa.timestamp("us", tz="UTC"),
    pa.timestamp("ns"),
    pa.timestamp("ns", tz="UTC"),
)
_BOOLEANS = pa.array([*TRUE_WORDS, *FALSE_WORDS])
_TABS = re.compile(r"\.tsv(\.\w+)?$")


def read_csv(file: SourceFile, write: Write) -> None:
    try:
        with _reader(file, {}) as reader:
            _refuse_bytes(reader.schema)
            unclear = [field.name for field in reader.schema if _is_unclear(field.type)]
            if not unclear:
                write(reader.schema, reader)
        if unclear:
            _write_as(_fields_of_all_rows(file, unclear), file, write)
    except pa.ArrowInvalid as error:
        if "conversion error" not in str(error):
            raise
        _write_as(_fields_of_all_rows(file, ()), file, write)
    refuse_open_quote(file)


def _is_unclear(kind: pa.DataType) -> bool:
    """Nothing but nulls so far; or a time of day, which is text in every other format."""
    return bool(pa.types.is_null(kind) or pa.types.is_time(kind))


def _refuse_bytes(schema: pa.Schema) -> None:
    """Arrow takes text that is no UTF-8 for bytes, of which nothing can be made."""
    for field in schema:
        if pa.types.is_binary(field.type):
            raise pa.ArrowInvalid(f"column {field.name!r} is no UTF-8 text")


def _write_as(fields: Mapping[str, pa.Field], file: SourceFile, write: Write) -> None:
    with _reader(file, {name: field.type for name, field in fields.items()}) as reader:
        write(pa.schema([fields.get(field.name, field) for field in reader.schema]), reader)


def _fields_of_all_rows(file: SourceFile, names: Sequence[str]) -> dict[str, pa.Field]:
    """For each of these columns (of all, when none is named) the first type that holds all of its values."""
    with _reader(file, {}) as reader:
        names = names or reader.schema.names
    columns = [_Column(name) for name in names]
    with _reader(file, dict.fromkeys(names, pa.string()), names) as reader:
        for batch in reader:
            for column, texts in zip(columns, batch.columns, strict=True):
                column.look_at(texts)
    return {column.name: column.field() for column in columns}


class _Column:
    """What the texts of a column can all be read as."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._possible = list(_CANDIDATES)
        self._has_values = False
        self._has_null_words = False

    def look_at(self, texts: pa.Array) -> None:
        if not self._possible:
            return
        void = is_null_word(texts)
        values = texts.filter(pc.invert(void))
        self._has_values |= len(values) > 0
        self._has_null_words |= pc.any(pc.and_(void, pc.not_equal(texts, "")), min_count=0).as_py()
        self._possible = [kind for kind in self._possible if _fits(values, kind)]

    def field(self) -> pa.Field:
        if self._has_values:
            return pa.field(self.name, self._possible[0] if self._possible else pa.string())
        return undecided_field(self.name) if self._has_null_words else pa.field(self.name, pa.null())


def _fits(values: pa.Array, kind: pa.DataType) -> bool:
    """Whether the reader can make this type of them."""
    if pa.types.is_boolean(kind):
        return bool(pc.all(pc.is_in(values, value_set=_BOOLEANS), min_count=0).as_py())
    if not pa.types.is_timestamp(kind):
        values = pc.utf8_trim(values, " \t")
    try:
        pc.cast(values, kind)
    except pa.ArrowException:
        return False
    return True


def _reader(
    file: SourceFile, types: Mapping[str, pa.DataType], columns: Sequence[str] = ()
) -> pc_csv.CSVStreamingReader:
    stream = open_file(file.path)
    packing = compression_of(file.path)
    if packing:
        stream = pa.CompressedInputStream(stream, packing)
    return pc_csv.open_csv(
        stream,
        read_options=pc_csv.ReadOptions(block_size=_BLOCK_BYTES),
        parse_options=parse_options("\t" if _TABS.search(file.path.lower()) else ","),
        convert_options=convert_options(types, columns),
    )
