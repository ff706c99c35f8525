"""The file of the alert book, `<home>/alerts/book.sqlite`. A damaged one may be replaced: the duties fire again what is
still wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from serin.machine.databases import Database

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


def book_file(home: Path) -> Database:
    return Database(path=home / "alerts" / "book.sqlite", tables=_TABLES, version=1, durable=True)
