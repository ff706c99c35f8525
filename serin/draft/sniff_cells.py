"""Finds out how the cells of CSV files are meant, for `serin init`: number marks, null texts, formats of dates."""

from __future__ import annotations

import calendar
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from serin.etl.sources.convert import open_csv
from serin.formats.csv_values import NULL_WORDS
from serin.formats.dataset import SourceFile

_MOST_BYTES = 64 * 2**20  # of cells that are looked at
_ODD_TEXTS = 200_000  # of a column that are not plain numbers
_FEW_WORDS, _MANY_NUMBERS = 2, 20  # so few words among so many different numbers mean null
_OTHER_WORDS = (
    "#NULL!", "(null)", "-", "--", ".", "<NA>", "?", "N.A.", "None", "Null", "\\N", "n.a.", "none",
)  # fmt: skip
_IN_TEXT = {
    "#N/A", "#NULL!", "(null)", "<NA>", "?", "N/A", "NA", "NULL", "NaN", "None", "\\N", "n/a", "nan", "null",
}  # fmt: skip
_WORDS = {*NULL_WORDS, *_OTHER_WORDS}
_PLAIN = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_COMMA = re.compile(r"[+-]?\d+,\d+")
_POINTS = re.compile(r"[+-]?\d{1,3}(\.\d{3})+(,\d+)?")
_COMMAS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_CODE = re.compile(r"[A-Z]{2}")
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?(Z|[+-]\d{2}:?\d{2})?)?")
_TIMES = (("", ""), (r" \d{1,2}:\d{2}", " %H:%M"), (r" \d{1,2}:\d{2}:\d{2}", " %H:%M:%S"),
          (r"T\d{2}:\d{2}", "T%H:%M"), (r"T\d{2}:\d{2}:\d{2}", "T%H:%M:%S"),
          *((rf" \d{{1,2}}:\d{{2}}{seconds}{word}", f" {clock}{more}{form}")
            for seconds, more in (("", ""), (r":\d{2}", ":%S"))
            for word, clock, form in ((" [AaPp][Mm]", "%I:%M", " %p"), ("[AaPp][Mm]", "%I:%M", "%p"),
                                      (" Uhr", "%H:%M", " Uhr"))))  # fmt: skip
_MONTHS = (
    (rf"(?:{'|'.join(calendar.month_abbr[1:])})", "%b"),
    (rf"(?:{'|'.join(calendar.month_name[1:])})", "%B"),
)
_DAYS = (
    *((rf"\d{{1,2}}{re.escape(sign)}\d{{1,2}}{re.escape(sign)}\d{{4}}", f"%d{sign}%m{sign}%Y") for sign in "./-"),
    *((rf"\d{{1,2}}{re.escape(sign)}\d{{1,2}}{re.escape(sign)}\d{{2}}", f"%d{sign}%m{sign}%y") for sign in "./-"),
    *((rf"\d{{4}}{re.escape(sign)}\d{{1,2}}{re.escape(sign)}\d{{1,2}}", f"%Y{sign}%m{sign}%d") for sign in "./"),
    *((rf"\d{{1,2}}{sign}(?i:{month}){sign}{digits}", f"%d{sign}{name}{sign}{year}") for month, name in _MONTHS
      for digits, year in ((r"\d{4}", "%Y"), (r"\d{2}", "%y")) for sign in " -"),
    *((rf"(?i:{month}) \d{{1,2}}, \d{{4}}", f"{name} %d, %Y") for month, name in _MONTHS),
)  # fmt: skip
_SHAPES = [(re.compile(day + time), form + part) for day, form in _DAYS for time, part in _TIMES]
_DATE = re.compile("|".join(f"(?:{shape.pattern})" for shape, _ in _SHAPES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sniffed:
    """`options`: keys of `data.tables.NAME`. `seen`: sentences that say why."""

    options: dict[str, Any] = field(default_factory=dict)
    seen: tuple[str, ...] = ()


class _Seen:
    """What was seen of a column. `odd`: distinct cells that are neither plain numbers nor words for null."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.plain = 0
        self.pointed: dict[str, None] = {}  # plain numbers with a point
        self.words: Counter[str] = Counter()
        self.odd: dict[str, None] = {}
        self.texts: Counter[str] = Counter()  # cells that are neither numbers nor dates
        self.numbers = 0  # different numbers in one batch

    def look_at(self, texts: pa.Array) -> None:
        counted = pc.value_counts(texts)
        cells, counts = counted.field("values"), counted.field("counts")
        plain = pc.match_substring_regex(cells, _PLAIN)
        self.plain += pc.sum(counts.filter(plain)).as_py() or 0
        pointed = cells.filter(pc.and_(plain, pc.match_substring(cells, ".")))
        self.pointed |= dict.fromkeys(cell.strip() for cell in pointed[:1000].to_pylist())
        odd = pc.invert(plain)
        for cell, count in zip(cells.filter(odd).to_pylist(), counts.filter(odd).to_pylist(), strict=True):
            if cell.strip() in _WORDS:
                self.words[cell] += count
            elif cell in self.texts:
                self.texts[cell] += count
            elif cell.strip() and len(self.odd) < _ODD_TEXTS:
                self.odd[cell.strip()] = None
                if len(self.odd) <= 1000 and not (_is_marked_number(cell.strip()) or is_date(cell.strip())):
                    self.texts[cell] += count
        self.numbers = max(self.numbers, len(cells.filter(plain)) + sum(map(_is_marked_number, self.odd)))
        if self.is_text and len(self.odd) > 1000:  # enough to tell codes from other texts
            self.odd = dict.fromkeys(list(self.odd)[:1000])

    def settle(self) -> None:
        """Takes one or two words that repeat among many numbers for null, whatever the language: "k.A.", "unknown"."""
        if not 0 < len(self.texts) <= _FEW_WORDS or self.numbers < _MANY_NUMBERS:
            return
        if all(count > 1 and not re.search(r"\d", cell) for cell, count in self.texts.items()):
            self.words += self.texts
            for cell in self.texts:
                del self.odd[cell.strip()]
            self.texts.clear()

    @property
    def is_text(self) -> bool:
        return bool(self.texts)

    @property
    def is_numbers(self) -> bool:
        if self.is_text or not (self.plain or self.odd):
            return False
        return all(_is_marked_number(cell) for cell in self.odd)

    @property
    def is_codes(self) -> bool:
        """Two capital letters throughout, of which NA may be one."""
        return len(self.odd) > 1 and sum(map(bool, map(_CODE.fullmatch, self.odd))) > 0.9 * len(self.odd)


def _is_marked_number(cell: str) -> bool:
    return any(form.fullmatch(cell) for form in (_COMMA, _POINTS, _COMMAS))


def sniff_cells(files: Sequence[SourceFile]) -> Sniffed:
    """How cells are written in the files of a table, whose encoding, delimiter, quotes and header are known."""
    columns: dict[str, _Seen] = {}
    try:
        for batch in _batches(files):
            for name, texts in zip(batch.schema.names, batch.columns, strict=True):
                columns.setdefault(name, _Seen(name)).look_at(texts)
    except (pa.ArrowException, UnicodeDecodeError):
        pass  # the next reader reports where the table is broken
    seen = list(columns.values())
    for column in seen:
        column.settle()
    dated = {
        column.name: find_date_formats(column.odd)
        for column in seen
        if not column.is_text and not column.plain
    }
    dates = {name: formats for name, formats in dated.items() if formats is not None}
    european = bool(files[0].csv and files[0].csv.delimiter == ";")
    parts = (_marks(seen, dates, european=european), _nulls(seen, dates), _dates(dates))
    return Sniffed(
        options={key: value for part in parts for key, value in part.options.items()},
        seen=tuple(sentence for part in parts for sentence in part.seen),
    )


def _batches(files: Sequence[SourceFile]) -> Iterator[pa.RecordBatch]:
    """The cells of the first files as text."""
    left = _MOST_BYTES
    for file in files:
        with open_csv(file, {}) as reader:
            names = reader.schema.names
        with open_csv(file, dict.fromkeys(names, pa.string())) as reader:
            for batch in reader:
                yield batch
                left -= batch.nbytes
                if left < 0:
                    return


def _marks(seen: Sequence[_Seen], dates: dict[str, DateFormats], *, european: bool) -> Sniffed:
    """The decimal mark and the mark between thousands."""
    numbers = [column for column in seen if column.is_numbers and column.odd and column.name not in dates]
    if not numbers:
        return Sniffed()
    cells = [cell for column in numbers for cell in column.odd]
    certain = [cell for cell in cells if _COMMA.fullmatch(cell) and not _COMMAS.fullmatch(cell)]
    grouped = [cell for cell in cells if cell.count(",") > 1 or re.search(r",\d{3}\.", cell)]
    names = _listed([column.name for column in numbers])
    comma = bool(certain) or (not grouped and (european or any(_POINTS.fullmatch(cell) for cell in cells)))
    if not comma:
        example = (grouped or cells)[0]
        return Sniffed(
            options={"thousands": ","}, seen=(f"commas separate thousands in {names}, such as {example}",)
        )
    example = (certain or cells)[0]
    said = [f"numbers have a decimal comma in {names}, such as {example}"]
    options: dict[str, Any] = {"decimal": ","}
    pointed = [column for column in seen if column.is_numbers and column.pointed]
    groups = [column for column in pointed if all(map(_POINTS.fullmatch, column.pointed))]
    points = [cell for column in groups for cell in column.pointed] + [cell for cell in cells if "." in cell]
    if points:
        options["thousands"] = "."
        said.append(f"points separate thousands, such as {points[0]}")
    unclear = [column.name for column in pointed if column not in groups]
    if unclear:
        options["decimal"] = {column.name: "," for column in numbers}
        said.append(f"numbers have a decimal point in {_listed(unclear)}")
    return Sniffed(options=options, seen=tuple(said))


def _nulls(seen: Sequence[_Seen], dates: dict[str, DateFormats]) -> Sniffed:
    """The texts that seem to mean null: in text the usual ones, beside numbers and dates others too."""
    found: dict[str, list[str]] = {}
    kept = []
    for column in seen:
        if column.is_numbers or column.name in dates:
            words = [word for word in column.words if word.strip() not in NULL_WORDS]
        elif column.is_codes:
            kept += [column.name] if "NA" in column.words else []
            words = [word for word in column.words if word.strip() in _IN_TEXT - {"NA"}]
        else:
            words = [word for word in column.words if word.strip() in _IN_TEXT] if column.odd else []
        if words:
            found[column.name] = words
    said = [f"NA in {_listed(kept)} is kept: the column holds codes of two letters"] if kept else []
    if not found:
        return Sniffed(seen=tuple(said))
    counts = sum((Counter({word: column.words[word] for word in found.get(column.name, ())}) for column in seen),
                 Counter[str]())  # fmt: skip
    shown = ", ".join(f"{word.strip()!r} ({count:,} cells)" for word, count in counts.most_common(6))
    said.insert(0, f"read as null, also by the served model: {shown} in {_listed(list(found))}")
    options: dict[str, Any] = {"null_values": found if kept else sorted(counts)}
    return Sniffed(options=options, seen=tuple(said))


def _dates(dates: dict[str, DateFormats]) -> Sniffed:
    named = {name: found for name, found in dates.items() if found.formats}
    said = []
    for name, found in named.items():
        shown = " and ".join(found.examples)
        many = f"{len(found.examples)} formats of dates" if len(found.examples) > 1 else "dates"
        said.append(f"{name} holds {many}, such as {shown}{found.doubt}")
    options = {"date_formats": {name: list(found.formats) for name, found in named.items()}} if named else {}
    return Sniffed(options=options, seen=tuple(said))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


@dataclass(frozen=True, slots=True, kw_only=True)
class DateFormats:
    """`formats`: those besides ISO 8601. `examples`: one text for each format. `doubt`: what could be otherwise."""

    formats: tuple[str, ...]
    examples: tuple[str, ...]
    doubt: str = ""


def is_date(text: str) -> bool:
    """Whether a text has the shape of a date."""
    return bool(_ISO.fullmatch(text) or _DATE.fullmatch(text))


def find_date_formats(texts: Iterable[str]) -> DateFormats | None:
    """The formats of the texts; None when one of them is not a date."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        iso = _ISO.fullmatch(text)
        form = next((form for shape, form in _SHAPES if shape.fullmatch(text)), None)
        if iso:
            form = "ISO" if iso[4] is None else "zone"
        if form is None:
            return None
        groups.setdefault(form, []).append(text)
    if not groups or ("zone" in groups and len(groups) > 1):
        return None
    formats, doubts = [], []
    for form, found in groups.items():
        if form in ("ISO", "zone"):
            continue
        chosen = [each for each in dict.fromkeys([form, _month_first(form)]) if _all_fit(found, each)]
        if not chosen:
            return None
        formats.append(chosen[0] if form[:5] in ("%d.%m", "%d-%m") or len(chosen) == 1 else chosen[-1])
        if len(chosen) > 1:
            doubts.append(f"{found[0]} may also be {chosen[0] if formats[-1] == chosen[1] else chosen[1]}")
    examples = tuple(found[0] for found in groups.values())
    return DateFormats(
        formats=tuple(formats),
        examples=examples,
        doubt=f" (no day is above 12: {doubts[0]})" if doubts else "",
    )


def _month_first(form: str) -> str:
    """The same format with day and month exchanged, where the text does not tell them apart."""
    if not re.match(r"%d.%m", form):
        return form
    return form.replace("%d", "%0").replace("%m", "%d").replace("%0", "%m")


def _all_fit(texts: Iterable[str], form: str) -> bool:
    try:
        for text in texts:
            datetime.strptime(text, form)  # noqa: DTZ007 (only whether it can be read)
    except ValueError:
        return False
    return True
