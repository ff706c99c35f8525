"""What the alert book contains, as plain values: alerts with their history, silences, and the outcome of deliveries."""

from __future__ import annotations

import fnmatch
import json
import re
import sqlite3
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from typing import Final, Literal

from serin.monitoring.alerts.alert import Alert

Event = Literal["fired", "resolved"]
CLOSED: Final = "closed"  # the fact that says why an alert was closed unresolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Nobody is notified of alerts whose key matches `pattern` (as in a shell: `flights/drift/*`), or of all alerts of
    `model`, before `until`."""

    id: int
    pattern: str | None
    model: str | None
    made: float
    until: float
    by: str
    why: str

    def covers(self, key: str, model: str, now: float) -> bool:
        if now >= self.until:
            return False
        return self.model == model if self.pattern is None else fnmatch.fnmatchcase(key, self.pattern)

    def may_cover(self, models: Collection[str]) -> bool:
        """Returns whether an alert of one of these models could ever match. Keys begin with the model's name."""
        if self.pattern is None:
            return self.model in models
        plain = re.split(r"[*?\[]", self.pattern, maxsplit=1)[0]
        exact = plain == self.pattern
        starts = [f"{model}/" for model in models]
        return any(plain.startswith(start) or (not exact and start.startswith(plain)) for start in starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRecord:
    """An alert as the book has it. `id`: unique among all books. `seen`: when a duty last confirmed it."""

    id: str
    alert: Alert
    fired: float
    seen: float
    resolved: float | None
    acknowledged: float | None
    acknowledged_by: str | None
    note: str | None
    silenced_until: float | None

    @property
    def ended(self) -> str:
        """How it ended: resolved, or closed and why."""
        closed = self.alert.facts.get(CLOSED)
        return f"closed: {closed}" if closed else "resolved"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverRecord:
    """The outcome of one receiver's messages. `given_up`: after a day of attempts; `dropped`: the queue was full.
    `problem`: why the last attempt failed, None when it succeeded."""

    name: str
    pending: int
    sent: int
    failed_attempts: int
    given_up: int
    dropped: int
    problem: str | None


def alert_of(row: sqlite3.Row) -> Alert:
    values = {each.name: row[each.name] for each in fields(Alert)}
    return Alert(**{**values, "facts": json.loads(values["facts"])})


def record_of(row: sqlite3.Row, book: str, silences: Iterable[Silence], now: float) -> AlertRecord:
    ends = [each.until for each in silences if each.covers(row["key"], row["model"], now)]
    return AlertRecord(
        id=f"{book}-{row['id']}",
        alert=alert_of(row),
        fired=row["fired"],
        seen=row["seen"],
        resolved=row["resolved"],
        acknowledged=row["acknowledged"],
        acknowledged_by=row["acknowledged_by"],
        note=row["note"],
        silenced_until=max(ends, default=None) if row["resolved"] is None else None,
    )


def silences_in(connection: sqlite3.Connection) -> list[Silence]:
    return [Silence(**dict(row)) for row in connection.execute("SELECT * FROM silences ORDER BY id")]


def book_id(connection: sqlite3.Connection) -> str:
    (found,) = connection.execute("SELECT id FROM book").fetchone()
    return str(found)
