"""The file of the alert book, `<home>/alerts/book.sqlite`: its tables, and connections to it."""

from __future__ import annotations

import contextlib
import logging
import secrets
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from serin.machine.private import make_private

log = logging.getLogger(__name__)

_VERSION: Final = 1
_WAIT_S: Final = 10.0  # for another process's transaction, which takes milliseconds
_NOT_A_BOOK: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_TABLES: Final = """
CREATE TABLE book (id TEXT NOT NULL);
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


def book_path(home: Path) -> Path:
    return home / "alerts" / "book.sqlite"


@contextlib.contextmanager
def changing(home: Path) -> Iterator[sqlite3.Connection]:
    """Opens the book for one durable transaction, and creates it if needed. A damaged file is put aside first: the
    duties fire again what is still wrong."""
    make_private(book_path(home).parent)
    connection = _connect_or_replace(home)
    try:
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def reading(home: Path) -> Iterator[sqlite3.Connection | None]:
    """Opens the book for reading; None when there is none, or it is not a book."""
    if not book_path(home).exists():
        yield None
        return
    try:
        connection = _connect(f"{book_path(home).absolute().as_uri()}?mode=rw")
    except sqlite3.DatabaseError as error:
        log.warning("the alert book %s cannot be read: %s", book_path(home), error)
        yield None
        return
    try:
        connection.execute("BEGIN")
        yield connection
    finally:
        connection.close()


def _connect_or_replace(home: Path) -> sqlite3.Connection:
    uri = f"{book_path(home).absolute().as_uri()}?mode=rwc"
    try:
        return _connect(uri)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) not in _NOT_A_BOOK:
            raise
        aside = book_path(home).with_name(f"book.broken-{time.time():.0f}")
        log.warning("the alert book is damaged (%s); it is kept as %s and a new one begins", error, aside)
        book_path(home).rename(aside)
        for suffix in ("-wal", "-shm"):
            book_path(home).with_name(f"book.sqlite{suffix}").unlink(missing_ok=True)
    return _connect(uri)


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=_WAIT_S, isolation_level=None)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = FULL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            _create(connection)
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"format {version} is of another version of Serin")
    except BaseException:
        connection.close()
        raise
    return connection


def _create(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == _VERSION:
            return  # another process has just made it
        for statement in _TABLES.split(";"):
            connection.execute(statement)
        connection.execute("INSERT INTO book VALUES (?)", (secrets.token_hex(6),))
        connection.execute(f"PRAGMA user_version = {_VERSION}")
