"""Converts CSV, JSON lines and Arrow files to Parquet, so that later steps read one format, in pieces."""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from serin.errors import SourceMissing, SourceUnreadable
from serin.etl.sources.csv2parquet import Write, read_arrow, read_csv
from serin.etl.sources.files import compression_of, file_format, open_file
from serin.etl.sources.malformed import broken_text
from serin.formats.dataset import SourceFile
from serin.store.file_systems import reason_of, remote_errors

_BLOCK_BYTES = 16 * 2**20
_CHANGED = re.compile(r"Column\(/([^)]*)\) changed from (\w+) to (\w+) in row (\d+)")


# The file is read twice: types must hold all rows, and JSON names none. Integers and floats in one column are
# floats; strings that are times in every row are times; any other mixture is refused with its row.
def read_json(file: SourceFile, write: Write) -> None:
    types: dict[str, pa.DataType] = {}
    row = 0
    for block in _blocks(file):
        table = _parse(block, row)
        for field in table.schema:
            types[field.name] = _wider(types.get(field.name), field, file, row)
        row += table.num_rows
    schema = pa.schema(list(types.items()))
    write(schema, (batch for block in _blocks(file) for batch in _parse(block, 0, schema).to_batches()))


def _parse(block: bytes, first_row: int, schema: pa.Schema | None = None) -> pa.Table:
    options = pa_json.ParseOptions(explicit_schema=schema) if schema is not None else None
    read = pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    try:
        table = pa_json.read_json(io.BytesIO(block), read_options=read, parse_options=options)
    except pa.ArrowInvalid as error:
        changed = _CHANGED.search(str(error))
        if changed is None:
            raise
        name, before, after, row = changed.groups()
        # Arrow sees no lines: what looks like another type may be a broken line, which is looked for afterwards.
        changed_row = f"column {name!r} is {after} in row {first_row + int(row)} and {before} before"
        raise pa.ArrowInvalid(changed_row) from error
    return table if schema is None else table.select(schema.names).cast(schema)


def _blocks(file: SourceFile) -> Iterator[bytes]:
    """The file in blocks of whole lines."""
    packing = compression_of(file.path)
    stream = open_file(file.path)
    reader = pa.CompressedInputStream(stream, packing) if packing else stream
    rest = b""
    while read := reader.read(_BLOCK_BYTES):
        whole, newline, rest = (rest + read).rpartition(b"\n")
        if whole.strip():
            yield whole + newline
    if rest.strip():
        yield rest


def _wider(before: pa.DataType | None, field: pa.Field, file: SourceFile, row: int) -> pa.DataType:
    kinds = {before, field.type} - {None}
    known = {kind for kind in kinds if not pa.types.is_null(kind)}
    if len(known) <= 1:
        return next(iter(known), pa.null())
    if known == {pa.int64(), pa.float64()}:
        return pa.float64()
    if all(pa.types.is_timestamp(kind) or pa.types.is_string(kind) for kind in known):
        return pa.string()  # text that happened to look like a time in some blocks
    reason = f"column {field.name!r} is {field.type} from row {row} on and {before} before"
    raise SourceUnreadable(table=file.table, path=file.path, reason=reason)


_FULL = (errno.ENOSPC, errno.EDQUOT)
_GROUP_ROWS = 2**18
_READERS = {"csv": read_csv, "json": read_json, "arrow": read_arrow}


def convert(file: SourceFile, target: Path) -> None:
    """Writes the file's rows to `target`; SourceUnreadable names the row that cannot be read."""
    found = file_format(file)
    assert found is not None
    try:
        _READERS[found](file, partial(write_groups, target))
    except FileNotFoundError:
        raise SourceMissing(table=file.table, path=file.path) from None
    except remote_errors() as error:
        raise SourceUnreadable(table=file.table, path=file.path, reason=reason_of(error)) from error
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) in _FULL:  # it was the writing that failed
            raise
        raise broken_text(file, error) from error


def write_groups(target: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """The batches as one Parquet file with row groups of even size."""
    with pq.ParquetWriter(target, schema, compression="lz4", write_page_checksum=True) as writer:
        held: list[pa.RecordBatch] = []
        for batch in batches:
            held.append(batch)
            if sum(each.num_rows for each in held) >= _GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(held, schema), row_group_size=_GROUP_ROWS)
                held = []
        if held:
            writer.write_table(pa.Table.from_batches(held, schema), row_group_size=_GROUP_ROWS)
