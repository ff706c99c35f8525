"""Says where a text file stops making sense. Slow, and only asked after a reader has failed."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from serin.errors import SourceUnreadable
from serin.etl.sources.files import compression_of, format_of, open_file
from serin.formats.dataset import SourceFile

_UNPACKING = (EOFError, OSError, zlib.error, lzma.LZMAError)
_SHOWN = 60
_BLOCK_BYTES = 16 * 2**20


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
        return _unreadable(
            file, f"line {_undecodable(file)} is no UTF-8 text ({wrong.reason}); write the file as UTF-8"
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
    with _unpacked(file) as content:
        quotes = sum(block.count(b'"') for block in iter(lambda: content.read(_BLOCK_BYTES), b""))
    if quotes % 2 == 0:
        return
    with io.TextIOWrapper(_unpacked(file), encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=_delimiter(file), strict=True)
        row, line = -1, 1
        try:
            for fields in reader:  # a quote inside of a value without quotes is a value's own
                row, line = row + bool(fields), reader.line_num + 1
        except csv.Error as error:
            where = f"row {row} (line {line})" if row >= 0 else "the first line"
            trouble = f"a quote is opened in {where} and not closed ({error}); mend that line"
            raise _unreadable(file, trouble) from error


def _delimiter(file: SourceFile) -> str:
    return "\t" if ".tsv" in file.path.lower() else ","


def _unreadable(file: SourceFile, reason: str) -> SourceUnreadable:
    return SourceUnreadable(table=file.table, path=file.path, reason=reason)


def _walk(file: SourceFile) -> Iterator[tuple[int, str | None]]:
    """(lines read, what is wrong with the last of them)."""
    with io.TextIOWrapper(_unpacked(file), encoding="utf-8-sig", newline="") as text:
        yield from _walk_json(text) if format_of(file.path) == "json" else _walk_csv(text, file)


def _walk_csv(text: io.TextIOWrapper, file: SourceFile) -> Iterator[tuple[int, str | None]]:
    reader = csv.reader(text, delimiter=_delimiter(file))
    width, row = 0, -1
    for fields in reader:
        if not fields:
            continue
        if row < 0:
            width = len(fields)
        elif len(fields) != width:
            shown = ",".join(fields)[:_SHOWN]
            trouble = (
                f"row {row} (line {reader.line_num}) has {len(fields)} fields where the first line names "
                f"{width} columns: {shown!r}; mend or remove that line"
            )
            yield reader.line_num, trouble
        row += 1
        yield reader.line_num, None


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
            yield number, f"row {row} (line {number}) is no JSON: {error}: {line.strip()[:_SHOWN]!r}"
        else:
            kind = None if isinstance(found, dict) else type(found).__name__
            yield (
                number,
                kind and f"row {row} (line {number}) is a {kind}; each line must be an object {{...}}",
            )
        row += 1


def _undecodable(file: SourceFile) -> int:
    """The first line that is no UTF-8."""
    number = 1
    with _unpacked(file) as lines:
        for line in lines:
            try:
                line.decode()
            except UnicodeDecodeError:
                break
            number += 1
    return number


def _unpack_all(file: SourceFile) -> None:
    if compression_of(file.path):
        with _unpacked(file) as content:
            while content.read(2**20):
                pass


def _unpacked(file: SourceFile) -> Any:
    stream: Any = io.BufferedReader(pa.PythonFile(open_file(file.path), "r"))
    packing = compression_of(file.path)
    if packing == "gzip":
        return gzip.GzipFile(fileobj=stream)
    if packing == "bz2":
        return bz2.BZ2File(stream)
    return pa.CompressedInputStream(open_file(file.path), packing) if packing else stream
