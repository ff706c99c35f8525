"""Finds out how a CSV file is written, for `serin init`: encoding, delimiter, quotes, header, meaning of cells."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from serin.draft.sniff_cells import Sniffed, sniff_cells
from serin.etl.sources.delta import is_delta
from serin.etl.sources.files import find_files, format_of
from serin.etl.sources.malformed import unpacked
from serin.formats.csv_format import csv_format
from serin.formats.dataset import SourceFile
from serin.spec.tables import DeltaTable, FileTable, TableSource

_HEAD_BYTES = 2**20
_HEAD_ROWS = 500
_BINARY = (b"PAR1", b"ARROW1", b"\x89HDF", b"PK\x03\x04", b"SQLite format 3")
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_NUMBER = re.compile(r"\s*[+-]?(\d+([.,]\d+)*|[.,]\d+)([eE][+-]?\d+)?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SniffedTable(Sniffed):
    """`key`: the key that takes the path; None when the path is the whole entry."""

    key: str | None = None

    def source(self, path: str) -> TableSource:
        """The entry of `data.tables` for the table at this path."""
        if self.key == "delta":
            return DeltaTable(delta=path)
        return FileTable(path=path, **self.options) if self.options else path


def table_lines(path: str, sniffed: SniffedTable) -> list[str]:
    """The lines of a spec that name the main table, with what was seen as comments."""
    lines = [f"    # {sentence}" for sentence in sniffed.seen]
    if not sniffed.options and sniffed.key is None:
        return [*lines, f"    main: {_flow(path)}"]
    options = [f"      {key}: {_flow(value)}" for key, value in sniffed.options.items()]
    return [*lines, "    main:", f"      {sniffed.key or 'path'}: {_flow(path)}", *options]


def _flow(value: Any) -> str:
    """YAML in one line, with quotes around every text: some words and signs have another meaning without."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return "'" + text.replace("'", "''") + "'" if text.isprintable() else json.dumps(text, ensure_ascii=False)


def sniff_table(path: str) -> SniffedTable:
    """How the CSV files at this path or URL are written; nothing for files in other formats."""
    if is_delta(path):
        said = "a Delta table: its newest version is read; `version` or `as_of` name another"
        return SniffedTable(seen=(said,), key="delta")
    files = find_files("main", path)
    if format_of(files[0].path) not in ("csv", None):
        return SniffedTable()
    with unpacked(files[0]) as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(_BINARY):
        return SniffedTable()
    encoding, said = _encoding(head, files[0])
    text = head.decode(encoding, errors="ignore").removeprefix("\ufeff")
    lines = text.splitlines(keepends=True)
    if not lines or (encoding == "utf-8" and "\0" in text):
        return SniffedTable()
    found = _dialect(lines[: -1 if len(head) == _HEAD_BYTES else None], files[0])
    options: dict[str, Any] = {"encoding": encoding} if encoding != "utf-8" else {}
    options |= found.options
    form = csv_format(FileTable(path=path, **options))
    if form is None and format_of(files[0].path) is None:
        options["delimiter"] = ","
        form = csv_format(FileTable(path=path, **options))
    cells = sniff_cells([replace(file, csv=form) for file in files])
    return SniffedTable(
        options=options | cells.options, seen=(*([said] if said else []), *found.seen, *cells.seen)
    )


def _encoding(head: bytes, file: SourceFile) -> tuple[str, str]:
    """The encoding, and what was seen of it ("" when there is nothing to say)."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            shown = "UTF-8" if name == "utf-8" else name.upper()
            return name, f"the file starts with a byte order mark: {shown}"
    zeros = head[:2000].count(0)
    if zeros > 0.3 * len(head[:2000]):
        name = "utf-16-le" if head[1:2] == b"\0" else "utf-16-be"
        return name, f"every other byte is zero: {name.upper()}"
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with unpacked(file) as stream:
        for block in iter(lambda: stream.read(_HEAD_BYTES), b""):
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                line += block[: error.start].count(b"\n")
                # Windows uses the bytes that Latin-1 leaves to control characters.
                name = "cp1252" if any(0x80 <= byte <= 0x9F for byte in block) else "latin-1"
                return name, f"line {line} is not valid UTF-8; read as {name}"
            line += block.count(b"\n")
    return "utf-8", ""


def _dialect(lines: Sequence[str], file: SourceFile) -> Sniffed:
    usual = "\t" if ".tsv" in file.path.lower() else ","
    ranked = []
    for quote in ('"', "'", ""):
        for delimiter in dict.fromkeys([usual, ";", "\t", "|", ","]):
            rows = _rows(lines, delimiter, quote)
            width, share = _width(rows)
            ranked.append((share > 0.98 and width > 1, share if width > 1 else 0.0, delimiter, quote, rows))
        if any(whole for whole, *_ in ranked):
            break
    whole = [entry for entry in ranked if entry[0]] or [entry for entry in ranked if entry[3] == '"']
    _, _, delimiter, quote, rows = max(whole, key=lambda entry: entry[1])
    options: dict[str, Any] = {}
    seen = []
    if delimiter != usual:
        options["delimiter"] = delimiter
        seen.append(f"fields are separated by {_NAMES[delimiter]}")
    if quote != '"':
        options["quote"] = quote
        seen.append("fields are quoted with '" if quote else "quotes are part of the values")
    columns = rows[0] if rows else []
    numbers = [cell.strip() for cell in columns if _NUMBER.fullmatch(cell)]
    if numbers and _is_data(rows):
        columns = [f"column_{number}" for number in range(1, len(columns) + 1)]
        options |= {"header": False, "names": columns}
        seen.append(
            f"there is no header (the first line holds values, such as {numbers[0]}): name the columns"
        )
    return Sniffed(options=options, seen=tuple(seen))


def _rows(lines: Sequence[str], delimiter: str, quote: str) -> list[list[str]]:
    quoting: dict[str, Any] = {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}
    rows = []
    try:
        for fields in csv.reader(lines, delimiter=delimiter, strict=True, **quoting):
            rows += [fields] if fields else []
            if len(rows) >= _HEAD_ROWS:
                break
    except csv.Error:
        return rows if len(rows) > 1 and not quote else rows[:1]
    return rows


def _width(rows: Sequence[Sequence[str]]) -> tuple[int, float]:
    """How many fields the first row has, and the share of rows that have as many."""
    if not rows:
        return 0, 0.0
    return len(rows[0]), Counter(map(len, rows))[len(rows[0])] / len(rows)


def _is_data(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first row looks like those below it: a number wherever they mostly have one, and no name twice."""
    below = [row for row in rows[1:] if len(row) == len(rows[0])]
    if not below:
        return False
    numeric = [
        place
        for place in range(len(rows[0]))
        if sum(_NUMBER.fullmatch(row[place]) is not None for row in below) > 0.5 * len(below)
    ]
    years = [cell for cell in rows[0] if re.fullmatch(r"(19|20)\d\d", cell)]
    if years and len(years) == len([cell for cell in rows[0] if _NUMBER.fullmatch(cell)]):
        return False  # a column for each year
    return bool(numeric) and all(_NUMBER.fullmatch(rows[0][place]) for place in numeric)
