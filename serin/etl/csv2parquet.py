"""Reads CSV files, packed or not.

Types are guessed from the file's beginning; when a later value does not fit, from all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from serin.etl.arrow2parquet import Write
from serin.etl.broken import refuse_open_quote
from serin.etl.sources import compression_of, open_file
from serin.formats.dataset import SourceFile

_BLOCK_BYTES = 16 * 2**20
_CANDIDATES = (pa.int64(), pa.float64(), pa.bool_(), pa.timestamp("us"), pa.timestamp("us", tz="UTC"))
_TABS = re.compile(r"\.tsv(\.\w+)?$")


def read_csv(file: SourceFile, write: Write) -> None:
    try:
        with _reader(file, {}) as reader:
            _refuse_bytes(reader.schema)
            write(reader.schema, reader)
    except pa.ArrowInvalid as error:
        if "conversion error" not in str(error):
            raise
        with _reader(file, _types_of_all_rows(file)) as reader:
            write(reader.schema, reader)
    refuse_open_quote(file)


def _refuse_bytes(schema: pa.Schema) -> None:
    """Arrow takes text that is no UTF-8 for bytes, of which nothing can be made."""
    for field in schema:
        if pa.types.is_binary(field.type):
            raise pa.ArrowInvalid(f"column {field.name!r} is no UTF-8 text")


def _types_of_all_rows(file: SourceFile) -> dict[str, pa.DataType]:
    """For each column the first type that holds all of its values."""
    with _reader(file, {}) as reader:
        names = reader.schema.names
    possible = {name: list(_CANDIDATES) for name in names}
    with _reader(file, dict.fromkeys(names, pa.string())) as reader:
        for batch in reader:
            for name in names:
                values = batch.column(name)
                possible[name] = [kind for kind in possible[name] if _fits(values, kind)]
    return {name: (kinds or [pa.string()])[0] for name, kinds in possible.items()}


def _fits(values: pa.Array, kind: pa.DataType) -> bool:
    try:
        pc.cast(values, kind)
    except pa.ArrowException:
        return False
    return True


def _reader(file: SourceFile, types: Mapping[str, pa.DataType]) -> pc_csv.CSVStreamingReader:
    stream = open_file(file.path)
    packing = compression_of(file.path)
    if packing:
        stream = pa.CompressedInputStream(stream, packing)
    return pc_csv.open_csv(
        stream,
        read_options=pc_csv.ReadOptions(block_size=_BLOCK_BYTES),
        parse_options=pc_csv.ParseOptions(delimiter="\t" if _TABS.search(file.path.lower()) else ","),
        convert_options=pc_csv.ConvertOptions(strings_can_be_null=True, column_types=dict(types)),
    )
