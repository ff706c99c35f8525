"""The messages of the alert book that are due: each is sent, tried again later, or given up. At most so many wait."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serin.monitoring.alerts.alert import (
    AlertRecord,
    Event,
    Silence,
    book_id,
    record_of,
    silences_in,
)
from serin.monitoring.alerts.book import BUILT_IN, book_file, pending

MOST_PENDING: Final = 1_000  # of one receiver; the oldest are dropped and counted
_LONGEST_PAUSE_S: Final = 300.0
_MOST_ATTEMPTS: Final = 300  # about a day


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One alert's beginning or end for one receiver. `number`: of the delivery in the book."""

    number: int
    receiver: str
    event: Event
    record: AlertRecord

    @property
    def id(self) -> str:
        """Is the same when a message is sent again, so that receivers can recognise a repetition."""
        return f"{self.record.id}-{self.number}"


class Outbox:
    """Used by one thread of one process. Messages of a receiver are sent in the order in which they were made."""

    def __init__(self, home: Path) -> None:
        self._file = book_file(home)

    def due(self, now: float, *, busy: Collection[str] = ()) -> list[Message]:
        """Returns the oldest due message of each receiver that is not busy, unless a silence holds it back."""
        with self._file.reading() as book:
            if book is None:
                return []
            rows = book.execute(
                "SELECT d.id AS number, d.receiver, d.event, d.next_try, a.* FROM deliveries d"
                " JOIN alerts a ON a.id = d.alert WHERE d.state = 'pending' ORDER BY d.id"
            )
            return _firsts(rows.fetchall(), silences_in(book), book_id(book), now, busy)

    def record_sent(self, message: Message) -> None:
        with self._file.changing() as book:
            book.execute(
                "UPDATE deliveries SET state = 'sent', attempts = attempts + 1, problem = NULL WHERE id = ?",
                (message.number,),
            )
            _count(book, message.receiver, "sent")

    def record_failure(self, message: Message, problem: str, now: float) -> bool:
        """Plans the next attempt: after 1 s, 2 s, 4 s and so on up to five minutes. False when it is given up."""
        with self._file.changing() as book:
            row = book.execute("SELECT * FROM deliveries WHERE id = ?", (message.number,)).fetchone()
            if row is None or row["state"] != "pending":
                return False
            attempts = row["attempts"] + 1
            pause_s = min(2.0 ** min(attempts - 1, 16), _LONGEST_PAUSE_S)
            alive: bool = attempts < _MOST_ATTEMPTS
            book.execute(
                "UPDATE deliveries SET attempts = ?, next_try = ?, problem = ?, state = ? WHERE id = ?",
                (attempts, now + pause_s, problem, "pending" if alive else "given_up", message.number),
            )
            _count(book, message.receiver, "failed_attempts")
            if not alive:
                _count(book, message.receiver, "given_up")
            return alive

    def drop_excess(self) -> int:
        """Drops the oldest messages of receivers with too many; returns how many. They are counted."""
        with self._file.reading() as book:
            waiting = {} if book is None else pending(book)
        excess = {name: number - MOST_PENDING for name, number in waiting.items() if number > MOST_PENDING}
        if excess:
            with self._file.changing() as book:
                for name, number in excess.items():
                    book.execute(
                        "UPDATE deliveries SET state = 'dropped' WHERE id IN (SELECT id FROM deliveries"
                        " WHERE receiver = ? AND state = 'pending' ORDER BY id LIMIT ?)",
                        (name, number),
                    )
                    _count(book, name, "dropped", number)
        return sum(excess.values())

    def cancel(self, receiver: str) -> None:
        """Cancels the messages that wait for a receiver, because it was removed."""
        with self._file.changing() as book:
            book.execute(
                "UPDATE deliveries SET state = 'cancelled' WHERE receiver = ? AND state = 'pending'",
                (receiver,),
            )
            book.execute("DELETE FROM counters WHERE receiver = ?", (receiver,))


def _firsts(
    rows: list[sqlite3.Row], silences: list[Silence], book: str, now: float, busy: Collection[str]
) -> list[Message]:
    """A message that must wait keeps later ones of its receiver waiting only if it is being tried: one that is
    silenced does not."""
    found: dict[str, Message | None] = dict.fromkeys(busy)
    for row in rows:
        name = row["receiver"]
        if name in found:
            continue
        record = record_of(row, book, silences, now)
        if name not in BUILT_IN and any(each.covers(row["key"], row["model"], now) for each in silences):
            continue
        # The pause is bounded, so a later time means that the clock was set back since.
        waits = now < row["next_try"] <= now + _LONGEST_PAUSE_S
        found[name] = (
            None if waits else Message(number=row["number"], receiver=name, event=row["event"], record=record)
        )
    return [message for message in found.values() if message is not None]


def _count(book: sqlite3.Connection, receiver: str, what: str, by: int = 1) -> None:
    book.execute(
        "INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET number = number + excluded.number",
        (receiver, what, by),
    )
