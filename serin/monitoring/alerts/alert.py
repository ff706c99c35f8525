"""An alert: what somebody should know about a model now, and when it began; and what the alert book contains about it,
as plain values: its history, silences, and the outcome of deliveries."""

from __future__ import annotations

import fnmatch
import json
import re
import sqlite3
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, Protocol

Event = Literal["fired", "resolved", "closed"]  # closed: nobody knows whether what it reported is over
CLOSED: Final = "closed"  # the fact that says why an alert was closed unresolved
Kind = Literal["objective", "drift", "quality", "data", "capture", "retrain", "rollout", "process", "lookup"]
Severity = Literal["page", "ticket", "info"]
"""`page`: somebody must look now; `ticket`: on the next working day; `info`: nothing must be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """`key` identifies what it is about, such as `flights/drift/carrier`: a second alert with the same key continues
    the first one. `model`: empty for an alert about the whole stack. `facts`: numbers and names for machines,
    JSON-able. `since`: when it began, which may be long before it was noticed."""

    key: str
    kind: Kind
    model: str
    release: str = ""
    severity: Severity
    title: str
    text: str
    since: float
    facts: Mapping[str, Any] = field(default_factory=dict)


class Alerts(Protocol):
    """Where duties report. Both calls may be repeated; neither waits for a delivery."""

    def fire(self, alert: Alert, now: float) -> None: ...

    def resolve(self, key: str, now: float, *, closed: str = "") -> None:
        """Ends an alert. Nothing happens when none with this key is open. `closed`: why it ends although nobody knows
        whether what it reported is over."""
        ...


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
    resolved: float | None = None
    acknowledged: float | None = None
    acknowledged_by: str | None = None
    note: str | None = None
    silenced_until: float | None = None

    @property
    def closed(self) -> str:
        """Why it ended although nobody knows whether what it reported is over; empty: it was resolved, or is open."""
        return str(self.alert.facts.get(CLOSED, ""))

    @property
    def ended(self) -> str:
        """How it ended: resolved, or closed and why."""
        return f"closed: {self.closed}" if self.closed else "resolved"


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


def record_of(row: sqlite3.Row, book: str, silences: Iterable[Silence], now: float) -> AlertRecord:
    values = {each.name: row[each.name] for each in fields(Alert)}
    ends = [each.until for each in silences if each.covers(row["key"], row["model"], now)]
    return AlertRecord(
        id=f"{book}-{row['id']}",
        alert=Alert(**{**values, "facts": json.loads(row["facts"])}),
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
