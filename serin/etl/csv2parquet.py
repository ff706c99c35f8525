"""Turns a CSV file into a Parquet file of ours, so that everything after it reads one format, in pieces.

Types are guessed from the file's beginning; when a later value does not fit, from all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq

from serin.errors import SourceMissing, SourceUnreadable
from serin.etl.sources import open_file
from serin.formats.dataset import SourceFile

_BLOCK_BYTES = 16 * 2**20
_GROUP_ROWS = 2**18
_CANDIDATES = (pa.int64(), pa.float64(), pa.bool_(), pa.timestamp("us"), pa.timestamp("us", tz="UTC"))
_SUFFIX = re.compile(r"\.(gz|bz2|zst)$")
_COMPRESSION = {"gz": "gzip", "bz2": "bz2", "zst": "zstd"}


def convert_csv(file: SourceFile, target: Path) -> None:
    """Writes the file's rows to `target`; SourceUnreadable when a line has too many or too few fields."""
    try:
        try:
            _stream(file, target, {})
        except pa.ArrowInvalid as error:
            if "conversion error" not in str(error):
                raise
            _stream(file, target, _types_of_all_rows(file))
    except FileNotFoundError:
        raise SourceMissing(table=file.table, path=file.path) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceUnreadable(table=file.table, path=file.path, reason=str(error)) from error


def _stream(file: SourceFile, target: Path, types: Mapping[str, pa.DataType]) -> None:
    with _reader(file, types) as reader, pq.ParquetWriter(target, reader.schema, compression="lz4") as writer:
        held: list[pa.RecordBatch] = []
        for batch in reader:
            held.append(batch)
            if sum(each.num_rows for each in held) >= _GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(held), row_group_size=_GROUP_ROWS)
                held = []
        if held:
            writer.write_table(pa.Table.from_batches(held), row_group_size=_GROUP_ROWS)


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
    packed = _SUFFIX.search(file.path.lower())
    if packed:
        stream = pa.CompressedInputStream(stream, _COMPRESSION[packed[1]])
    name = _SUFFIX.sub("", file.path.lower())
    return pc_csv.open_csv(
        stream,
        read_options=pc_csv.ReadOptions(block_size=_BLOCK_BYTES),
        parse_options=pc_csv.ParseOptions(delimiter="\t" if name.endswith(".tsv") else ","),
        convert_options=pc_csv.ConvertOptions(strings_can_be_null=True, column_types=dict(types)),
    )
