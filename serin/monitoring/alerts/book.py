"""The alert book: which alerts are open, who acknowledged or silenced them, and which messages are due. `read_alerts`
reads it for people: status, console and Prometheus.

An alert and its messages are stored in one transaction, so a process that is killed loses none. Several processes may
use the book at once.

Where the disk takes no more, an alert is kept in a second book in the stack's folder in memory, until the first one
takes it: the alert that a disk is full needs no disk.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serin.errors import AlertRefused, FileBroken, ReceiverRefused
from serin.machine.databases import Database
from serin.machine.in_memory import memory_folder
from serin.monitoring.alerts.alert import (
    CLOSED,
    Alert,
    AlertRecord,
    Event,
    ReceiverRecord,
    Silence,
    book_id,
    record_of,
    silences_in,
)
from serin.monitoring.alerts.receivers import ReceiverFile

log = logging.getLogger(__name__)

LOG, PREFECT = "log", "prefect"
BUILT_IN: Final = (LOG, PREFECT)  # never silenced: one is for the record, the other starts retraining

_SEEN_S: Final = 30.0  # how exact `seen` is
_KEPT_ALERTS: Final = 5_000
_KEPT_LINES: Final = 20_000
_RANK: Final = {"info": 0, "ticket": 1, "page": 2}
_JOURNAL: Final = "SELECT t, event, key, by, detail FROM journal ORDER BY id DESC LIMIT ?"
_TABLES: Final = """
CREATE TABLE book (id TEXT NOT NULL);
INSERT INTO book VALUES (lower(hex(randomblob(6))));
CREATE TABLE alerts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL, kind TEXT NOT NULL, model TEXT NOT NULL,
    release TEXT NOT NULL, severity TEXT NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL, since REAL NOT NULL,
    facts TEXT NOT NULL, fired REAL NOT NULL, seen REAL NOT NULL, resolved REAL,
    acknowledged REAL, acknowledged_by TEXT, note TEXT
) STRICT;
CREATE UNIQUE INDEX open_alerts ON alerts (key) WHERE resolved IS NULL;
CREATE INDEX alerts_by_model ON alerts (model, fired);
CREATE TABLE silences (
    id INTEGER PRIMARY KEY AUTOINCREMENT, pattern TEXT, model TEXT, made REAL NOT NULL, until REAL NOT NULL,
    by TEXT NOT NULL, why TEXT NOT NULL
) STRICT;
CREATE TABLE journal (
    id INTEGER PRIMARY KEY AUTOINCREMENT, t REAL NOT NULL, event TEXT NOT NULL, key TEXT NOT NULL, by TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;
CREATE TABLE deliveries (
    id INTEGER PRIMARY KEY AUTOINCREMENT, alert INTEGER NOT NULL, event TEXT NOT NULL, receiver TEXT NOT NULL,
    state TEXT NOT NULL, made REAL NOT NULL, next_try REAL NOT NULL, attempts INTEGER NOT NULL, problem TEXT
) STRICT;
CREATE INDEX pending_deliveries ON deliveries (receiver, id) WHERE state = 'pending';
CREATE INDEX deliveries_by_alert ON deliveries (alert);
CREATE TABLE counters (
    receiver TEXT NOT NULL, what TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (receiver, what)
) STRICT;
"""


class AlertBook:
    """Implements `Alerts`. Every call is durable when it returns, and waits for no delivery."""

    def __init__(self, home: Path, receivers: Sequence[str] | None = None) -> None:
        """`receivers`: of messages; None: the built-in ones and those of `home`."""
        self._home, self._file, self._given = home, book_file(home), receivers

    def fire(self, alert: Alert, now: float) -> None:
        """Opens an alert, or updates the open one with its key. A message is due when it opens and when its severity
        rises."""
        spare = self._spare()
        try:
            self._fire(self._file, alert, now)
        except (sqlite3.OperationalError, OSError, FileBroken) as error:
            if spare is None:
                raise
            if not self._is_current(spare, alert, now):
                log.warning(
                    "the alert %s is kept in memory: %s cannot be written: %s",
                    alert.key,
                    self._file.path,
                    error,
                )
            self._fire(spare, alert, now)
        else:
            if spare is not None and spare.path.exists():
                with spare.changing() as book:
                    book.execute("DELETE FROM alerts WHERE key = ? AND resolved IS NULL", (alert.key,))

    def _spare(self) -> Database | None:
        memory = memory_folder(self._home)
        return None if memory is None else book_file(memory)

    def _fire(self, file: Database, alert: Alert, now: float) -> None:
        if self._is_current(file, alert, now):
            return
        with file.changing() as book:
            row = _open(book, alert.key)
            if row is None:
                number = _insert(book, alert, now)
                _write(book, now, "fired", alert.key, detail=alert.title)
                self._notify(book, number, "fired", now)
                _forget_old(book)
                return
            _update(book, row["id"], alert, now)
            if _RANK[alert.severity] > _RANK[row["severity"]]:
                _write(book, now, "raised", alert.key, detail=alert.severity)
                self._notify(book, row["id"], "fired", now)

    def resolve(self, key: str, now: float, *, closed: str = "") -> None:
        """Ends an alert. Nothing happens when none with this key is open. Receivers that never got the alert because
        it was silenced get no message about its end."""
        spare = self._spare()
        if spare is not None and spare.path.exists():
            self._resolve(spare, key, now, closed)
        self._resolve(self._file, key, now, closed)

    def _resolve(self, file: Database, key: str, now: float, closed: str) -> None:
        with file.reading() as book:
            if book is None or _open(book, key) is None:
                return
        with file.changing() as book:
            row = _open(book, key)
            if row is None:
                return
            facts = {**json.loads(row["facts"]), **({CLOSED: closed} if closed else {})}
            book.execute(
                "UPDATE alerts SET resolved = ?, facts = ? WHERE id = ?", (now, json.dumps(facts), row["id"])
            )
            event: Event = "closed" if closed else "resolved"
            _write(book, now, event, key, detail=closed)
            unheard = _cancel_silenced(book, row, now)
            self._notify(book, row["id"], event, now, but=unheard)

    def acknowledge(self, key: str, *, by: str, note: str = "", now: float) -> AlertRecord:
        """Records that somebody looks after an open alert. Returns the alert as it was before.

        One that is acknowledged already changes only when there is a new note; the journal keeps the earlier one.
        Raises AlertRefused when no alert with this key is open; it names those of the same model alone.
        """
        with self._file.changing() as book:
            row = _open(book, key)
            if row is None:
                opened = [
                    each["key"] for each in book.execute("SELECT key FROM alerts WHERE resolved IS NULL")
                ]
                model = key.partition("/")[0]
                raise AlertRefused(
                    key=key, known=[each for each in opened if each.partition("/")[0] == model]
                )
            before = record_of(row, book_id(book), silences_in(book), now)
            if before.acknowledged is not None and not note:
                return before
            book.execute(
                "UPDATE alerts SET acknowledged = ?, acknowledged_by = ?, note = ? WHERE id = ?",
                (now, by, note, row["id"]),
            )
            _write(book, now, "acknowledged", key, by=by, detail=note)
            return before

    def silence(
        self,
        *,
        pattern: str | None = None,
        model: str | None = None,
        until: float,
        by: str,
        why: str = "",
        now: float,
    ) -> Silence:
        """Holds back messages about alerts with a matching key, or of a model, until a time. An alert that is still
        open then is sent."""
        if (pattern is None) == (model is None):
            raise ValueError("name either a pattern or a model")
        with self._file.changing() as book:
            for each in silences_in(book):
                if (each.pattern, each.model, each.made, each.by) == (pattern, model, now, by):
                    return each  # the same call was repeated
            found = book.execute(
                "INSERT INTO silences (pattern, model, made, until, by, why) VALUES (?, ?, ?, ?, ?, ?)",
                (pattern, model, now, until, by, why),
            )
            detail = f"until {until:.0f}{': ' if why else ''}{why}"
            _write(book, now, "silenced", pattern or f"{model}/*", by=by, detail=detail)
            assert found.lastrowid is not None
            return Silence(
                id=found.lastrowid, pattern=pattern, model=model, made=now, until=until, by=by, why=why
            )

    def end_silence(self, number: int, *, by: str, now: float) -> None:
        """Ends a silence before its time. Nothing happens when it has ended already."""
        with self._file.changing() as book:
            changed = book.execute(
                "UPDATE silences SET until = ? WHERE id = ? AND until > ?", (now, number, now)
            )
            if changed.rowcount:
                _write(book, now, "silence ended", str(number), by=by)

    def _is_current(self, file: Database, alert: Alert, now: float) -> bool:
        """Whether the book has this alert already, so that a duty may fire it at every tick without a write."""
        with file.reading() as book:
            row = None if book is None else _open(book, alert.key)
            return (
                row is not None
                and 0 <= now - row["seen"] < _SEEN_S
                and (row["severity"], row["title"], row["release"])
                == (alert.severity, alert.title, alert.release)
            )

    def _notify(
        self,
        book: sqlite3.Connection,
        number: int,
        event: str,
        now: float,
        but: frozenset[str] = frozenset(),
    ) -> None:
        names = [*BUILT_IN, *self._receivers()] if self._given is None else self._given
        book.executemany(
            "INSERT INTO deliveries (alert, event, receiver, state, made, next_try, attempts)"
            " VALUES (?, ?, ?, 'pending', ?, ?, 0)",
            [(number, event, name, now, now) for name in names if name not in but],
        )

    def _receivers(self) -> list[str]:
        """An alert must not be lost because the file of receivers is damaged."""
        try:
            return [each.name for each in ReceiverFile(self._home).read()]
        except ReceiverRefused as error:
            log.warning("%s", error)
            return []


def _open(book: sqlite3.Connection, key: str) -> sqlite3.Row | None:
    found: sqlite3.Row | None = book.execute(
        "SELECT * FROM alerts WHERE key = ? AND resolved IS NULL", (key,)
    ).fetchone()
    return found


def _insert(book: sqlite3.Connection, alert: Alert, now: float) -> int:
    found = book.execute(
        "INSERT INTO alerts (key, kind, model, release, severity, title, text, since, facts, fired, seen)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            alert.key, alert.kind, alert.model, alert.release, alert.severity, alert.title, alert.text,
            alert.since, json.dumps(dict(alert.facts)), now, now,
        ),
    )  # fmt: skip
    assert found.lastrowid is not None
    return found.lastrowid


def _update(book: sqlite3.Connection, number: int, alert: Alert, now: float) -> None:
    """`since` keeps the earliest time: an alert may learn later how long it has been true."""
    book.execute(
        "UPDATE alerts SET release = ?, severity = ?, title = ?, text = ?, since = min(since, ?), facts = ?, seen = ?"
        " WHERE id = ?",
        (
            alert.release, alert.severity, alert.title, alert.text, alert.since, json.dumps(dict(alert.facts)),
            now, number,
        ),
    )  # fmt: skip


def _write(
    book: sqlite3.Connection, now: float, event: str, key: str, *, by: str = "serin", detail: str = ""
) -> None:
    book.execute(
        "INSERT INTO journal (t, event, key, by, detail) VALUES (?, ?, ?, ?, ?)",
        (now, event, key, by, detail),
    )


def _cancel_silenced(book: sqlite3.Connection, row: sqlite3.Row, now: float) -> frozenset[str]:
    """Cancels messages that a silence held back; returns their receivers."""
    if not any(each.covers(row["key"], row["model"], now) for each in silences_in(book)):
        return frozenset()
    held = book.execute(
        "UPDATE deliveries SET state = 'cancelled' WHERE alert = ? AND state = 'pending'"
        " AND receiver NOT IN (?, ?) AND attempts = 0 RETURNING receiver",
        (row["id"], *BUILT_IN),
    ).fetchall()
    return frozenset(each["receiver"] for each in held)


def _forget_old(book: sqlite3.Connection) -> None:
    """Deletes the oldest resolved alerts, journal lines and silences beyond what is kept."""
    book.execute(
        "DELETE FROM alerts WHERE resolved IS NOT NULL AND id <= (SELECT max(id) FROM alerts) - ?",
        (_KEPT_ALERTS,),
    )
    book.execute(
        "DELETE FROM deliveries WHERE state != 'pending' AND alert <= (SELECT max(id) FROM alerts) - ?",
        (_KEPT_ALERTS,),
    )
    book.execute("DELETE FROM journal WHERE id <= (SELECT max(id) FROM journal) - ?", (_KEPT_LINES,))
    book.execute("DELETE FROM silences WHERE id <= (SELECT max(id) FROM silences) - ?", (_KEPT_ALERTS,))


def book_file(home: Path) -> Database:
    return Database(path=home / "alerts" / "book.sqlite", tables=_TABLES, version=1, durable=True)


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
            receivers=_receiver_records(book),
        )


def _receiver_records(book: sqlite3.Connection) -> tuple[ReceiverRecord, ...]:
    """Returns the outcome of the messages of each receiver that was ever sent one."""
    waiting = pending(book)
    counted: dict[str, dict[str, int]] = {name: {} for name in waiting}
    for row in book.execute("SELECT receiver, what, number FROM counters"):
        counted.setdefault(row["receiver"], {})[row["what"]] = row["number"]
    problems = {
        row["receiver"]: row["problem"]
        for row in book.execute(
            "SELECT receiver, problem, max(id) FROM deliveries WHERE attempts > 0 GROUP BY receiver"
        )
    }
    return tuple(
        ReceiverRecord(
            name=name,
            pending=waiting.get(name, 0),
            sent=numbers.get("sent", 0),
            failed_attempts=numbers.get("failed_attempts", 0),
            given_up=numbers.get("given_up", 0),
            dropped=numbers.get("dropped", 0),
            problem=problems.get(name),
        )
        for name, numbers in sorted(counted.items())
    )


def pending(book: sqlite3.Connection) -> dict[str, int]:
    """Returns how many messages wait for each receiver."""
    return {
        row["receiver"]: row["number"]
        for row in book.execute(
            "SELECT receiver, count(*) AS number FROM deliveries WHERE state = 'pending' GROUP BY receiver"
        )
    }
