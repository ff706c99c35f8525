"""Reads the alert book for people: `read_alerts` for status, console and Prometheus."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from serin.monitoring.alerts.alert import (
    AlertRecord,
    ReceiverRecord,
    Silence,
    book_id,
    record_of,
    silences_in,
)
from serin.monitoring.alerts.book import book_file
from serin.monitoring.alerts.outbox import receiver_records

_JOURNAL = "SELECT t, event, key, by, detail FROM journal ORDER BY id DESC LIMIT ?"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLine:
    t: float
    event: str
    key: str
    by: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertsView:
    """`open`: newest first; `resolved`: the last ones, newest first; `silences`: those in force; `journal`: the last
    lines, newest first. `receivers`: those that were ever sent something."""

    open: tuple[AlertRecord, ...] = ()
    resolved: tuple[AlertRecord, ...] = ()
    silences: tuple[Silence, ...] = ()
    journal: tuple[JournalLine, ...] = ()
    receivers: tuple[ReceiverRecord, ...] = ()


def read_alerts(
    home: Path, model: str | None = None, *, resolved: int = 50, lines: int = 0, now: float | None = None
) -> AlertsView:
    """Reads the alerts of a model, or all of them. A home without a book has none."""
    now = time.time() if now is None else now
    with book_file(home).reading() as book:
        if book is None:
            return AlertsView()
        silences = silences_in(book)
        where, values = ("", ()) if model is None else ("AND model = ?", (model,))
        ours = f"SELECT * FROM alerts WHERE resolved IS NULL {where} ORDER BY fired DESC, id DESC"  # noqa: S608
        past = (
            f"SELECT * FROM alerts WHERE resolved IS NOT NULL {where} ORDER BY resolved DESC, id DESC LIMIT ?"  # noqa: S608
        )
        name = book_id(book)
        in_force = (each for each in silences if now < each.until)
        return AlertsView(
            open=tuple(record_of(row, name, silences, now) for row in book.execute(ours, values)),
            resolved=tuple(record_of(row, name, (), now) for row in book.execute(past, (*values, resolved))),
            silences=tuple(each for each in in_force if model is None or each.model in (None, model)),
            journal=tuple(JournalLine(**dict(row)) for row in book.execute(_JOURNAL, (lines,))),
            receivers=receiver_records(book),
        )
