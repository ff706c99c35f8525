"""Rows to be scored, from a file and to a file: Parquet, CSV, or JSON with one object per line.

Text formats carry no types, so the model's schema gives them: "0123" stays text where the model asks for text, and so
does "NA", which is a missing value in every other column of a CSV file. A CSV file may be written like the table that
the model was trained on. Files are read and written in pieces; a result appears whole or not at all.
"""

from __future__ import annotations

import csv
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from serin.errors import RowsUnfit
from serin.formats.csv_format import PLAIN, CsvFormat, csv_format
from serin.formats.csv_values import NULL_WORDS, CellRules, convert_options, parse_options
from serin.formats.nulls import without_null_strings
from serin.formats.schema import ELEMENTS, InputColumn, Schema
from serin.spec.tables import TableSource
from serin.spec.yaml_file import read_mapping

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


def read_rows(
    path: Path, schema: Schema, bundle: Path | None = None, form: CsvFormat | None = None
) -> Iterator[pa.Table]:
    """The file's rows, a piece at a time; RowsUnfit when the file is missing, unreadable or of no known kind. `bundle`:
    the file may be written like the table that this one was trained on, also with other names for its columns. `form`:
    how a CSV file is written, whatever it is called."""
    rename = {} if bundle is None else names_in_training(bundle)
    for table in _read_rows(path, schema, bundle, form):
        yield as_requested(table, schema, rename)


def _read_rows(path: Path, schema: Schema, bundle: Path | None, form: CsvFormat | None) -> Iterator[pa.Table]:
    try:
        match ".csv" if form is not None else path.suffix.lower():
            case ".parquet" | ".pq":
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(PIECE_ROWS):
                        yield pa.Table.from_batches([batch])
            case ".csv":
                yield from _read_csv(path, schema, bundle, form)
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
        if temporary.exists() and temporary.stat().st_size:  # no rows, no file
            temporary.replace(path)
    except (OSError, pa.ArrowException) as error:
        raise RowsUnfit(column="", reason=f"cannot be written to {path}: {error}") from error
    finally:
        writer.close()
        temporary.unlink(missing_ok=True)


def _read_csv(path: Path, schema: Schema, bundle: Path | None, form: CsvFormat | None) -> Iterator[pa.Table]:
    training = None if bundle is None else training_csv(bundle)
    if form is not None:
        training = TrainingCsv(form=form, rename={} if training is None else training.rename)
    names = [] if training is None else training.names_in(path)
    if training is not None and (form is not None or training.serves(names, schema)):
        yield from _read_like_training(path, schema, training, names)
        return
    with pacsv.open_csv(path, parse_options=parse_options()) as reader:
        types = dict.fromkeys(reader.schema.names, pa.string())  # what only passes through stays as it is
    types |= {column.name: _arrow_type(column) for column in schema.inputs}
    times = {column.name for column in schema.inputs if column.kind == "timestamp"} & types.keys()
    read = pacsv.ReadOptions(block_size=_BLOCK_BYTES)
    with pacsv.open_csv(path, read, parse_options(), convert_options(types)) as reader:
        for batch in _batches(reader):
            table = pa.Table.from_batches([batch])
            for name in times.intersection(table.column_names):
                texts = without_null_strings(table.column(name), NULL_WORDS)
                table = table.set_column(table.column_names.index(name), name, texts)
            yield table


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCsv:
    """How the main table of a model was written. `rename`: name in the file -> name in requests."""

    form: CsvFormat
    rename: Mapping[str, str]

    def names_in(self, path: Path) -> list[str]:
        """The columns of a file that is written like this; none when it cannot be."""
        delimiter = self.form.delimiter_of(str(path))
        quoting: Any = {"quotechar": self.form.quote} if self.form.quote else {"quoting": csv.QUOTE_NONE}
        try:
            with path.open(encoding=self.form.text_encoding, newline="") as text:
                first = next(filter(None, csv.reader(text, delimiter=delimiter, **quoting)), [])
        except (UnicodeDecodeError, csv.Error):
            return []
        if self.form.names:
            return list(self.form.names) if len(first) == len(self.form.names) else []
        return first if self.form.header else [f"column_{place}" for place in range(1, len(first) + 1)]

    def serves(self, names: list[str], schema: Schema) -> bool:
        """Whether these columns hold all that a model asks for."""
        return {column.name for column in schema.inputs} <= {self.rename.get(name, name) for name in names}


def training_csv(bundle: Path) -> TrainingCsv | None:
    """How the main table of a bundle was written; None when neither options nor other names say so.

    Nothing else of the spec is validated: your own operators need not be installed where rows are scored."""
    if not (bundle / "spec.yaml").exists():
        return None
    data = read_mapping(bundle / "spec.yaml").get("data") or {}
    main = next(iter(data.get("tables") or ()), None)
    if main is None:
        return None
    form = csv_format(TypeAdapter(TableSource).validate_python(data["tables"][main]))
    rename = (data.get("rename") or {}).get(main) or {}
    return TrainingCsv(form=form or PLAIN, rename=rename) if form is not None or rename else None


@lru_cache(maxsize=8)
def names_in_training(bundle: Path) -> Mapping[str, str]:
    """Name in the main table -> name in requests, where they differ."""
    training = training_csv(bundle)
    return {} if training is None else training.rename


def as_requested(table: pa.Table, schema: Schema, rename: Mapping[str, str]) -> pa.Table:
    """The rows under the names that the model asks for, where they have those of the table that it was trained on."""
    asked, present = {column.name for column in schema.inputs}, set(table.column_names)
    names = {
        old: new for old, new in rename.items() if old in present and new in asked and new not in present
    }
    return table.rename_columns([names.get(name, name) for name in table.column_names]) if names else table


def _read_like_training(
    path: Path, schema: Schema, training: TrainingCsv, names: list[str]
) -> Iterator[pa.Table]:
    form = training.form
    inputs = {column.name: column for column in schema.inputs}
    read = pacsv.ReadOptions(
        block_size=_BLOCK_BYTES,
        encoding=form.encoding,
        column_names=names,
        skip_rows_after_names=int(form.header),
    )
    parse = parse_options(form.delimiter_of(str(path)), form.quote)
    convert = pacsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    with pacsv.open_csv(path, read, parse, convert) as reader:
        for batch in _batches(reader):
            columns = {}
            for stored, cells in zip(names, batch.columns, strict=True):
                name = training.rename.get(stored, stored)
                if name in inputs:
                    cells = _converted(cells, inputs[name], CellRules.of(form, stored))
                columns[name] = cells
            yield pa.table(columns)


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    """The rows of a reader; one batch without rows for a file that has columns only."""
    batch = None
    for batch in reader:
        yield batch
    if batch is None:
        yield pa.RecordBatch.from_pylist([], reader.schema)


def _converted(cells: pa.Array, column: InputColumn, rules: CellRules) -> pa.Array:
    kind = _TYPE_OF_KIND[column.kind]
    if column.kind == "timestamp" and rules.date_formats:
        kind = pa.timestamp("us")
    elif column.kind == "timestamp":
        cells = rules.without_nulls(cells)
    try:
        return rules.converted(cells, kind)
    except pa.ArrowException as error:
        raise RowsUnfit(
            column=column.name, reason=f"holds a cell that is not {column.kind}: {error}"
        ) from error


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
            values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
            own = [f"{field.name}_{name}" for name in names]
            if clash := sorted(set(own).intersection(table.column_names)):
                reason = "has the name of a column of the result; rename or drop it"
                raise RowsUnfit(column=clash[0], reason=reason)
            elements = values.reshape(len(column), len(names)).T
            columns |= {name: pa.array(each) for name, each in zip(own, elements, strict=True)}
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
            # JSON has no NaN
            known = {name: None if value != value else value for name, value in row.items()}
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
