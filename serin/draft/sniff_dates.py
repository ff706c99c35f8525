"""Finds the formats of dates that explain all texts of a column, for `serin init`."""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

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
        form = ("ISO" if iso[4] is None else "zone") if iso else _form_of(text)
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


def _form_of(text: str) -> str | None:
    return next((form for shape, form in _SHAPES if shape.fullmatch(text)), None)


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
