"""Converts CSV, JSON lines and Arrow files to Parquet, so that later steps read one format, in pieces.

Types of CSV are inferred from the beginning of the file; from all of it when the beginning is not enough for a column,
when a later value does not fit, or when options of the table say how the column's cells are written. A file of JSON
lines is read twice: types must hold all rows, and JSON names none. Integers and floats in one column are floats;
strings that are times in every row are times; any other mixture is refused with its row.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from serin.errors import SourceMissing, SourceUnreadable, nearest
from serin.etl.sources.files import compression_of, file_format, open_file
from serin.etl.sources.malformed import broken_text, first_fields, refuse_open_quote, refuse_other_delimiter
from serin.formats.csv_format import PLAIN, CsvFormat
from serin.formats.csv_values import CellRules, convert_options, parse_options
from serin.formats.dataset import SourceFile
from serin.store.file_systems import reason_of, remote_errors

_BLOCK_BYTES = 16 * 2**20
_TIME = pa.timestamp("us")
_CANDIDATES = (
    pa.int64(),
    pa.float64(),
    pa.bool_(),
    _TIME,
    pa.timestamp("us", tz="UTC"),
    pa.timestamp("ns"),
    pa.timestamp("ns", tz="UTC"),
)
_MARK = {b"serin": b"undecided"}
_CHANGED = re.compile(r"Column\(/([^)]*)\) changed from (\w+) to (\w+) in row (\d+)")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GROUP_ROWS = 2**18
Write = Callable[[pa.Schema, Iterable[pa.RecordBatch]], None]


def convert(file: SourceFile, target: Path) -> None:
    """Writes the file's rows to `target`; SourceUnreadable names the row that cannot be read."""
    readers = {"csv": read_csv, "json": read_json, "arrow": read_arrow}
    form = file_format(file)
    assert form is not None
    try:
        readers[form](file, partial(write_groups, target))
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


def read_csv(file: SourceFile, write: Write) -> None:
    form = file.csv or PLAIN
    try:
        with open_csv(file, {}) as reader:
            _refuse_columns(file, form, reader.schema)
            unclear = [field.name for field in reader.schema if _is_unclear(field, form)]
            if not unclear:
                write(reader.schema, _named_nulls(reader, form))
        if unclear:
            _write_as(_fields_of_all_rows(file, unclear), file, write)
    except pa.ArrowInvalid as error:
        if "conversion error" not in str(error):
            raise
        _write_as(_fields_of_all_rows(file, ()), file, write)
    refuse_open_quote(file)


def _is_unclear(field: pa.Field, form: CsvFormat) -> bool:
    """Nothing but nulls so far; a time of day, which is text in every other format; or cells that Arrow does not read
    as the options say."""
    if pa.types.is_string(field.type) and (form.thousands or form.date_formats):
        return True
    return bool(
        pa.types.is_null(field.type) or pa.types.is_time(field.type) or field.name in form.named_columns
    )


def _refuse_columns(file: SourceFile, form: CsvFormat, schema: pa.Schema) -> None:
    """Refuses columns that Arrow reads as bytes because they are not UTF-8, and those that an option names and the file
    does not have."""
    for field in schema:
        if pa.types.is_binary(field.type):
            raise pa.ArrowInvalid(f"column {field.name!r} is not UTF-8 text")
    refuse_other_delimiter(file, schema.names)
    known = schema.names
    for name, option in form.named_columns.items():
        if name not in known:
            reason = f"it has no column {name!r}, which {option} names{nearest(name, known)}"
            raise SourceUnreadable(table=file.table, path=file.path, reason=reason)


def _named_nulls(batches: Iterable[pa.RecordBatch], form: CsvFormat) -> Iterator[pa.RecordBatch]:
    """The batches with nulls for the texts that the options name, in columns of text."""
    for batch in batches:
        texts = [field for field in batch.schema if form.null_values and pa.types.is_string(field.type)]
        yield _converted(batch, texts, form)


def _write_as(fields: Mapping[str, pa.Field], file: SourceFile, write: Write) -> None:
    form = file.csv or PLAIN
    own = {name for name in fields if form != PLAIN}  # else Arrow reads every cell as it is meant
    types = {name: pa.string() if name in own else field.type for name, field in fields.items()}
    with open_csv(file, types) as reader:
        schema = pa.schema([fields.get(field.name, field) for field in reader.schema])
        meant = [field for field in schema if field.name in own]
        write(schema, (_converted(batch, meant, form) for batch in _named_nulls(reader, form)))


def _converted(batch: pa.RecordBatch, fields: Iterable[pa.Field], form: CsvFormat) -> pa.RecordBatch:
    """The batch with the cells of these columns as the options say."""
    for field in fields:
        index = batch.schema.get_field_index(field.name)
        cells = CellRules.of(form, field.name).converted(batch.column(index), field.type)
        batch = batch.set_column(index, field, cells)
    return batch


def _fields_of_all_rows(file: SourceFile, names: Sequence[str]) -> dict[str, pa.Field]:
    """For each of these columns (of all, when none is named) the first type that holds all of its values."""
    with open_csv(file, {}) as reader:
        names = names or reader.schema.names
    columns = [_Column(name, file) for name in names]
    with open_csv(file, dict.fromkeys(names, pa.string()), names) as reader:
        for batch in reader:
            for column, texts in zip(columns, batch.columns, strict=True):
                column.look_at(texts)
    return {column.name: column.field() for column in columns}


class _Column:
    """What the texts of a column can all be read as."""

    def __init__(self, name: str, file: SourceFile) -> None:
        self.name = name
        form = file.csv or PLAIN
        self._file = file
        self._rules = CellRules.of(form, name)
        self._dated = name in dict(form.of_column_dates)
        self._possible = [_TIME] if self._dated else list(_CANDIDATES)
        self._rows = 0
        self._has_values = False
        self._has_null_words = False

    def look_at(self, texts: pa.Array) -> None:
        if not self._possible:
            return
        void = self._rules.is_null(texts)
        values = texts.filter(pc.invert(void))
        self._has_values |= len(values) > 0
        named = self._rules.is_named_null(texts)
        self._has_null_words |= pc.any(pc.and_(void, pc.invert(named)), min_count=0).as_py()
        self._possible = [kind for kind in self._possible if _fits(self._rules, values, kind)]
        if self._dated and not self._possible:
            self._refuse_date(texts)
        self._rows += len(texts)

    def field(self) -> pa.Field:
        if self._has_values:
            return pa.field(self.name, self._possible[0] if self._possible else pa.string())
        if self._has_null_words:
            return pa.field(self.name, pa.string(), metadata=_MARK)
        return pa.field(self.name, pa.null())

    def _refuse_date(self, texts: pa.Array) -> None:
        """SourceUnreadable with the first text that is not a date in one of the column's formats."""
        void = self._rules.is_null(texts).to_pylist()
        for row, text in enumerate(texts):
            if not void[row] and not _fits(self._rules, pa.array([text.as_py()]), _TIME):
                formats = ", ".join(self._rules.date_formats)
                reason = (
                    f"row {self._rows + row}: {text.as_py()!r} in column {self.name!r} fits none of its date formats "
                    f"({formats}); add its format to data.tables.{self._file.table}.date_formats"
                )
                raise SourceUnreadable(table=self._file.table, path=self._file.path, reason=reason)


def _fits(rules: CellRules, values: pa.Array, kind: pa.DataType) -> bool:
    """Whether the reader can make this type of them."""
    try:
        rules.converted(values, kind)
    except pa.ArrowException:
        return False
    return True


def open_csv(
    file: SourceFile, types: Mapping[str, pa.DataType], columns: Sequence[str] = ()
) -> pc_csv.CSVStreamingReader:
    """The file's rows in batches. `types`: of columns whose type is known. `columns`: those to read; none means all."""
    form = file.csv or PLAIN
    names = column_names(file, form)
    return pc_csv.open_csv(
        _unpacked(file),
        read_options=pc_csv.ReadOptions(
            block_size=_BLOCK_BYTES,
            encoding=form.encoding,
            column_names=names,
            skip_rows_after_names=int(bool(names) and form.header),
        ),
        parse_options=parse_options(form.delimiter_of(file.path), form.quote),
        convert_options=convert_options(types, columns, decimal=form.decimal, null_values=form.null_values),
    )


def column_names(file: SourceFile, form: CsvFormat) -> list[str] | None:
    """The columns' names where the header does not give them."""
    if form.header or form.names:
        return list(form.names) or None
    return [f"column_{number}" for number in range(1, len(first_fields(file)) + 1)]


# One file cannot tell, so its text is kept and the column is marked; the table's other files say what it is. Where none
# of them does, it is text.
def is_undecided(field: pa.Field) -> bool:
    return bool(field.metadata) and field.metadata.get(b"serin") == _MARK[b"serin"]


def types_of(schema: pa.Schema) -> dict[str, pa.DataType]:
    """The columns' types, null for the undecided: any other file's type is wider."""
    return {field.name: pa.null() if is_undecided(field) else field.type for field in schema}


def decided(types: dict[str, pa.DataType], undecided: Iterable[str]) -> dict[str, pa.DataType]:
    """The types of all files together, text where no file knew better."""
    return types | {name: pa.string() for name in undecided if pa.types.is_null(types[name])}


def read_arrow(file: SourceFile, write: Write) -> None:
    try:
        reader = pa.ipc.open_file(open_file(file.path))
    except pa.ArrowInvalid:
        stream = pa.ipc.open_stream(open_file(file.path))
        write(stream.schema, stream)
        return
    write(reader.schema, (reader.get_batch(index) for index in range(reader.num_record_batches)))


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
    stream, rest = _unpacked(file), b""
    while read := stream.read(_BLOCK_BYTES):
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


def _unpacked(file: SourceFile) -> Any:
    packing = compression_of(file.path)
    stream = open_file(file.path)
    return pa.CompressedInputStream(stream, packing) if packing else stream
