"""Rows to be scored, from a file and to a file: Parquet, CSV, or JSON with one object per line.

Text formats carry no types, so the model's schema gives them: "0123" stays text where the model asks for text, and so
does "NA", which is a missing value in every other column of a CSV file. Files are read and written in pieces; a result
appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pyarrow.parquet as pq

from serin.errors import RowsUnfit
from serin.formats.csv_rows import as_requested, names_in_training, read_like_training, training_csv
from serin.formats.csv_values import convert_options, parse_options, without_null_words
from serin.formats.schema import ELEMENTS, InputColumn, Schema

PIECE_ROWS = 65_536
_BLOCK_BYTES = 8 * 2**20
_TYPE_OF_KIND = {
    "string": pa.string(),
    "float": pa.float64(),
    "int": pa.int64(),
    "bool": pa.bool_(),
    "timestamp": pa.string(),  # the wire conversion reads more forms than the parsers here
}


class RowWriter(Protocol):
    def write_table(self, table: pa.Table) -> None: ...


def read_rows(path: Path, schema: Schema, bundle: Path | None = None) -> Iterator[pa.Table]:
    """The file's rows, a piece at a time; RowsUnfit when the file is missing, unreadable or of no known kind. `bundle`:
    the file may be written like the table that this one was trained on, also with other names for its columns."""
    rename = {} if bundle is None else names_in_training(bundle)
    for table in _read_rows(path, schema, bundle):
        yield as_requested(table, schema, rename)


def _read_rows(path: Path, schema: Schema, bundle: Path | None) -> Iterator[pa.Table]:
    try:
        match path.suffix.lower():
            case ".parquet" | ".pq":
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(PIECE_ROWS):
                        yield pa.Table.from_batches([batch])
            case ".csv":
                yield from _read_csv(path, schema, bundle)
            case ".json" | ".jsonl" | ".ndjson":
                options = pajson.ParseOptions(explicit_schema=_explicit(path, schema))
                read = pajson.ReadOptions(block_size=_BLOCK_BYTES)
                with pajson.open_json(path, read, parse_options=options) as reader:
                    for batch in reader:
                        yield pa.Table.from_batches([batch])
            case suffix:
                raise RowsUnfit(column="", reason=f"in {path}: {suffix or 'no suffix'} is unknown; {_KNOWN}")
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise RowsUnfit(column="", reason=f"cannot be read from {path}: {error}") from error


@contextmanager
def write_rows(path: Path) -> Iterator[RowWriter]:
    """A writer for tables of one form. The file is there when the block ends well, and untouched when it does not."""
    if path.suffix.lower() not in _WRITERS:
        raise RowsUnfit(column="", reason=f"cannot be written to {path}: {_KNOWN}")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    writer = _WRITERS[path.suffix.lower()](temporary)
    try:
        yield writer
        writer.close()
        if temporary.exists():  # no rows, no file
            temporary.replace(path)
    except (OSError, pa.ArrowException) as error:
        raise RowsUnfit(column="", reason=f"cannot be written to {path}: {error}") from error
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)


def _read_csv(path: Path, schema: Schema, bundle: Path | None) -> Iterator[pa.Table]:
    training = None if bundle is None else training_csv(bundle)
    alike = None if training is None else read_like_training(path, schema, training)
    if alike is not None:
        yield from alike
        return
    with pacsv.open_csv(path, parse_options=parse_options()) as reader:
        types = dict.fromkeys(reader.schema.names, pa.string())  # what only passes through stays as it is
    types |= {column.name: _arrow_type(column) for column in schema.inputs}
    times = {column.name for column in schema.inputs if column.kind == "timestamp"} & types.keys()
    read = pacsv.ReadOptions(block_size=_BLOCK_BYTES)
    with pacsv.open_csv(path, read, parse_options(), convert_options(types)) as reader:
        for batch in reader:
            table = pa.Table.from_batches([batch])
            for name in times.intersection(table.column_names):
                texts = without_null_words(table.column(name))
                table = table.set_column(table.column_names.index(name), name, texts)
            yield table


def _explicit(path: Path, schema: Schema) -> pa.Schema:
    """Types for the columns that are there: a column that is only named would come back full of nulls. A row may lack
    a key, so rows are read until every column has been seen."""
    wanted = {column.name: column for column in schema.inputs}
    found: dict[str, Any] = {}
    with path.open(encoding="utf-8-sig") as file:
        for line in file:
            row = _object(line)
            found |= {name: row[name] for name in wanted.keys() & row.keys() if found.get(name) is None}
            if len(found) == len(wanted):
                break
    return pa.schema(
        [(name, _arrow_type(wanted[name])) for name in wanted if name in found and not _nested(found[name])]
    )


def _object(line: str) -> dict[str, Any]:
    """What the line says; nothing when it is not a JSON object, which the parser then explains."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _arrow_type(column: InputColumn) -> pa.DataType:
    return _TYPE_OF_KIND[column.kind] if column.dims == (1,) else pa.list_(_TYPE_OF_KIND[column.kind])


def _nested(value: Any) -> bool:
    """A list of lists: the parser finds the depth by itself."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


class _Parquet:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None

    def write_table(self, table: pa.Table) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Csv(_Parquet):
    def write_table(self, table: pa.Table) -> None:
        table = flat(table)
        if self._writer is None:
            self._writer = pacsv.CSVWriter(self._path, table.schema)
        self._writer.write_table(table)


def flat(table: pa.Table) -> pa.Table:
    """The table as CSV can hold it: a list of named elements as a column for each, another list as JSON text,
    the number of a class as its name."""
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        names = json.loads((field.metadata or {}).get(ELEMENTS, b"null"))
        if names is not None and not pa.types.is_nested(field.type):
            columns[field.name] = pa.array(names).take(column.combine_chunks())
        elif names is not None:
            values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
            columns |= {
                f"{field.name}_{name}": pa.array(each) for name, each in zip(names, values.T, strict=True)
            }
        elif pa.types.is_nested(field.type):
            columns[field.name] = pa.array([json.dumps(value) for value in column.to_pylist()], pa.string())
        else:
            columns[field.name] = column
    return pa.table(columns)


class _Json:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write_table(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            known = {
                name: None if value != value else value for name, value in row.items()
            }  # JSON has no NaN
            self._file.write(json.dumps(known, default=_text, ensure_ascii=False) + "\n")

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _text(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


_KNOWN = "use .parquet, .csv or .jsonl"
_WRITERS: dict[str, Any] = {
    ".parquet": _Parquet,
    ".pq": _Parquet,
    ".csv": _Csv,
    ".jsonl": _Json,
    ".ndjson": _Json,
}
