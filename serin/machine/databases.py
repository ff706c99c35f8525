"""SQLite files that several processes use at once (WAL), created when needed and put aside when damaged."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serin.errors import FileBroken
from serin.machine.durable import make_private

log = logging.getLogger(__name__)

_WAIT_S: Final = 10.0  # for another process's transaction, which takes milliseconds
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """`tables`: the statements that create it. `durable`: a transaction survives a power cut once it has returned;
    otherwise only a kill."""

    path: Path
    tables: str
    version: int
    durable: bool

    def open(self) -> sqlite3.Connection:
        """Opens the file for changes, in a private folder. One that is damaged is renamed, and a new one begins."""
        make_private(self.path.parent)
        try:
            return self._connect("rwc")
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_CANTOPEN:
                advice = "check its permissions and the space on its disk, or move it away: a new one begins"
                raise FileBroken(path=self.path, problem=str(error), advice=advice) from error
            if getattr(error, "sqlite_errorcode", None) not in _DAMAGED:
                raise
            aside = self.path.with_name(f"{self.path.stem}.broken-{time.time():.0f}")
            log.warning("%s is damaged (%s); it is kept as %s and a new one begins", self.path, error, aside)
            self.path.rename(aside)
            for suffix in ("-wal", "-shm"):
                self.path.with_name(f"{self.path.name}{suffix}").unlink(missing_ok=True)
        return self._connect("rwc")

    @contextlib.contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """Opens the file for one transaction."""
        with contextlib.closing(self.open()) as connection, transaction(connection):
            yield connection

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection | None]:
        """Opens the file for reading, at one moment of its content; None when there is none or it cannot be read."""
        try:
            connection = self._connect("rw") if self.path.exists() else None
        except sqlite3.DatabaseError as error:
            log.warning("%s cannot be read: %s", self.path, error)
            connection = None
        if connection is None:
            yield None
            return
        with contextlib.closing(connection):
            connection.execute("BEGIN")
            yield connection

    def _connect(self, mode: str) -> sqlite3.Connection:
        uri = f"{self.path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(uri, uri=True, timeout=_WAIT_S, isolation_level=None)
        try:
            connection.row_factory = sqlite3.Row
            connection.execute(f"PRAGMA synchronous = {'FULL' if self.durable else 'NORMAL'}")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._create(connection)
            elif version != self.version:
                raise sqlite3.DatabaseError(
                    f"{self.path} has format {version}, of another version of Serin; move it away"
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def _create(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        with transaction(connection):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == self.version:
                return  # another process has just made it
            for statement in self.tables.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {self.version}")


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Applies all changes of the block, or none."""
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        yield
