"""Says where a text file stops making sense, and which value makes a text of a column that is numbers otherwise. Slow,
and only asked to explain a refusal."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.errors import SourceUnreadable
from serin.etl.sources.files import compression_of, file_format, open_file, open_parquet, origin_of
from serin.formats.csv_format import PLAIN
from serin.formats.csv_values import is_null_word
from serin.formats.dataset import SourceFile

_UNPACKING = (EOFError, OSError, zlib.error, lzma.LZMAError)
_NUMBER = r"^\s*[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+|inf|nan)\s*$"
_COMMA = r"^\s*[+-]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?\s*$"
_SHOWN = 60
_BLOCK_BYTES = 16 * 2**20
_HEAD_ROWS = 20  # that a delimiter is guessed from


def broken_text(file: SourceFile, error: Exception) -> SourceUnreadable:
    """The reader's error with the row and line that caused it, when one can be found."""
    lines = 0
    try:
        for read, trouble in _walk(file):
            lines = read
            if trouble:
                _unpack_all(file)  # what was packed wrongly looks like a broken line
                return _unreadable(file, trouble)
    except UnicodeDecodeError as wrong:
        return _unreadable(file, _wrong_encoding(file, wrong))
    except csv.Error as wrong:
        return _unreadable(
            file, f"the row after line {lines} cannot be read: {wrong}; is a quote not closed?"
        )
    except _UNPACKING as wrong:
        packed = compression_of(file.path) or "data"
        return _unreadable(
            file,
            f"the {packed} is corrupt or cut off after about line {lines} ({wrong}); fetch the file again",
        )
    if not lines:
        return _unreadable(file, "it is empty; take it away, or write it with its columns' names")
    return _unreadable(file, str(error))


def refuse_open_quote(file: SourceFile) -> None:
    """SourceUnreadable when a CSV file ends within quotes: Arrow takes all that follows the quote for one value."""
    if _count_quotes(file, (file.csv or PLAIN).quote) % 2 == 0:
        return
    with _text(file) as text:
        reader = _csv_reader(text, file, strict=True)
        row, line = -1, 1
        try:
            for fields in reader:  # a quote inside of a value without quotes is a value's own
                row, line = row + bool(fields), reader.line_num + 1
        except csv.Error as error:
            where = f"row {row} (line {line})" if row >= 0 else "the first line"
            trouble = (
                f"a quote is opened in {where} and not closed ({error}); correct that line, or set "
                f"data.tables.{file.table}.quote when quotes mean nothing"
            )
            raise _unreadable(file, trouble) from error


def _count_quotes(file: SourceFile, quote: str) -> int:
    if not quote:
        return 0
    if (file.csv or PLAIN).encoding == "utf-8":
        with unpacked(file) as content:
            return sum(block.count(quote.encode()) for block in iter(lambda: content.read(_BLOCK_BYTES), b""))
    with _text(file) as text:
        return sum(block.count(quote) for block in iter(lambda: text.read(_BLOCK_BYTES), ""))


def refuse_other_delimiter(file: SourceFile, columns: Sequence[str]) -> None:
    """SourceUnreadable when the only column of a CSV file seems to be several, between which is another delimiter."""
    if len(columns) > 1 or (file.csv is not None and file.csv.delimiter):
        return
    with _text(file) as text:
        try:
            rows = [fields for fields in itertools.islice(_csv_reader(text, file), _HEAD_ROWS) if fields]
        except csv.Error:
            return  # nothing can be said about its fields
    found = _other_delimiter(rows, file)
    if found is not None:
        start = ",".join(rows[0])[:_SHOWN]
        reason = f"the header has 1 field: {start!r}; {_ask_delimiter(found, file)}"
        raise _unreadable(file, reason)


def first_fields(file: SourceFile) -> list[str]:
    """The fields of a CSV file's first line that is not empty."""
    with _text(file) as text:
        try:
            return next(filter(None, _csv_reader(text, file)), [])
        except csv.Error as error:
            raise _unreadable(file, f"its first line cannot be read: {error}") from error


def _other_delimiter(rows: Sequence[Sequence[str]], file: SourceFile) -> str | None:
    """The delimiter that cuts the first line and all others into the same number of fields, of which there are
    several."""
    used = (file.csv or PLAIN).delimiter_of(file.path)
    lines = [used.join(fields) for fields in rows]
    for delimiter in ";\t|,":
        widths = {len(fields) for fields in csv.reader(lines, delimiter=delimiter)}
        if delimiter != used and len(lines) > 1 and len(widths) == 1 and max(widths) > 1:
            return delimiter
    return None


def _ask_delimiter(delimiter: str, file: SourceFile) -> str:
    return f"is the delimiter {delimiter!r}? Set data.tables.{file.table}.delimiter"


def _wrong_encoding(file: SourceFile, wrong: UnicodeDecodeError) -> str:
    if file.csv is not None and file.csv.encoding != "utf-8":
        where = f"it is not {file.csv.encoding} text ({wrong.reason} at byte {wrong.start} of a block)"
        return f"{where}; correct data.tables.{file.table}.encoding"
    advice = "write the file as UTF-8"
    if file_format(file) == "csv":
        advice = f"set data.tables.{file.table}.encoding (latin-1, cp1252 or utf-16), or {advice}"
    return f"line {_undecodable(file)} is not valid UTF-8 text ({wrong.reason}); {advice}"


def _text(file: SourceFile) -> io.TextIOWrapper:
    return io.TextIOWrapper(unpacked(file), encoding=(file.csv or PLAIN).text_encoding, newline="")


def _csv_reader(text: io.TextIOWrapper, file: SourceFile, *, strict: bool = False) -> Any:
    form = file.csv or PLAIN
    quoting = {"quotechar": form.quote} if form.quote else {"quoting": csv.QUOTE_NONE}
    return csv.reader(text, delimiter=form.delimiter_of(file.path), strict=strict, **quoting)


def _unreadable(file: SourceFile, reason: str) -> SourceUnreadable:
    return SourceUnreadable(table=file.table, path=file.path, reason=reason)


def _walk(file: SourceFile) -> Iterator[tuple[int, str | None]]:
    """(lines read, what is wrong with the last of them)."""
    with _text(file) as text:
        yield from _walk_json(text) if file_format(file) == "json" else _walk_csv(text, file)


def _walk_csv(text: io.TextIOWrapper, file: SourceFile) -> Iterator[tuple[int, str | None]]:
    reader, form = _csv_reader(text, file), file.csv or PLAIN
    width, head = len(form.names), list[list[str]]()
    for fields in reader:
        if not fields:
            continue
        head += [fields] if len(head) < _HEAD_ROWS else []
        width = width or len(fields)
        if len(fields) != width:
            line = reader.line_num
            head += list(itertools.islice(filter(None, reader), _HEAD_ROWS - len(head)))
            yield line, _wrong_width(file, fields, width, line, head)
        yield reader.line_num, None


def _wrong_width(
    file: SourceFile, fields: Sequence[str], width: int, line: int, head: Sequence[Sequence[str]]
) -> str:
    form = file.csv or PLAIN
    header = "the header has" if form.header else "the first line has"
    names = f"data.tables.{file.table}.names has" if form.names else header
    shown = form.delimiter_of(file.path).join(fields)[:_SHOWN]
    other = None if form.delimiter else _other_delimiter(head, file)
    advice = "correct or remove that line" if other is None else _ask_delimiter(other, file)
    return f"line {line} has {len(fields)} fields but {names} {width}: {shown!r}; {advice}"


def _walk_json(text: io.TextIOWrapper) -> Iterator[tuple[int, str | None]]:
    row = 0
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        if row == 0 and line.lstrip().startswith("["):
            yield number, "it is one JSON array; write one object per line (jq -c '.[]' does)"
        try:
            found = json.loads(line)
        except ValueError as error:
            yield number, f"row {row} (line {number}) is not JSON: {error}: {line.strip()[:_SHOWN]!r}"
        else:
            kind = None if isinstance(found, dict) else type(found).__name__
            yield (
                number,
                kind and f"row {row} (line {number}) is a {kind}; each line must be an object {{...}}",
            )
        row += 1


def _undecodable(file: SourceFile) -> int:
    """Returns the first line that is not UTF-8."""
    number = 1
    with unpacked(file) as lines:
        for line in lines:
            try:
                line.decode()
            except UnicodeDecodeError:
                break
            number += 1
    return number


def _unpack_all(file: SourceFile) -> None:
    if compression_of(file.path):
        with unpacked(file) as content:
            while content.read(2**20):
                pass


def unpacked(file: SourceFile) -> Any:
    """The bytes of a text file, as a stream."""
    stream: Any = io.BufferedReader(pa.PythonFile(open_file(file.path), "r"))
    packing = compression_of(file.path)
    if packing == "gzip":
        return gzip.GzipFile(fileobj=stream)
    if packing == "bz2":
        return bz2.BZ2File(stream)
    return pa.CompressedInputStream(open_file(file.path), packing) if packing else stream


def odd_text(file: SourceFile, column: str) -> str | None:
    """Returns the first value that is not a number in a string column with mostly numbers; None if there is none."""
    source = open_parquet(file)
    row = 0
    for index in range(source.metadata.num_row_groups):
        values = source.read_row_group(index, columns=[column]).column(column)
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            return None
        number = pc.or_(pc.match_substring_regex(values, _NUMBER), is_null_word(values))
        numeric = number.fill_null(True).to_numpy()
        if not numeric.all():
            first = int(np.argmin(numeric))
            if numeric.mean() < 0.5:
                return _decimal_comma(values, file)
            shown = values[first].as_py()[:60]
            text = f"row {row + first} of {origin_of(file).path} holds {shown!r}, which is not a number"
            return f"{text}{_advice(file, 'if it means null, name it in', 'null_values')}"
        row += len(values)
    return "its values are numbers, stored as text" if row else None


def _decimal_comma(values: pa.ChunkedArray, file: SourceFile) -> str | None:
    """Why a column is text, when its numbers have a decimal comma."""
    numbers = (
        pc.or_(pc.match_substring_regex(values, _COMMA), is_null_word(values)).fill_null(True).to_numpy()
    )
    if numbers.mean() < 0.5:
        return None
    return f"its numbers have a decimal comma{_advice(file, 'set', 'decimal')}"


def _advice(file: SourceFile, what: str, option: str) -> str:
    """The option that helps with a CSV file; nothing for another format."""
    origin = origin_of(file)
    return f"; {what} data.tables.{origin.table}.{option}" if file_format(origin) == "csv" else ""
