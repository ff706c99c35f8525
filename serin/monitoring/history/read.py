"""The file of the history, and how it is read: `read_history` for people, `counts_since` for objectives."""

from __future__ import annotations

import sqlite3
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serin.machine.databases import Database
from serin.machine.typed_json import Document, Row

AT: Final = "@"  # before the host in the arm of a series, where those of several hosts are added up
NUMBERS: Final = ("requests", "errors", "saved", "slow", "refused", "gone")
_QUANTILES: Final = (0.5, 0.95, 0.99)
_VERSION: Final = 2

_TABLES: Final = """
CREATE TABLE state (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE series (
    id INTEGER PRIMARY KEY, model TEXT NOT NULL, release TEXT NOT NULL, arm TEXT NOT NULL,
    UNIQUE (model, release, arm)
) STRICT;
CREATE TABLE counts (
    series INTEGER NOT NULL, width INTEGER NOT NULL, start INTEGER NOT NULL, requests INTEGER NOT NULL,
    errors INTEGER NOT NULL, saved INTEGER NOT NULL, slow INTEGER NOT NULL, refused INTEGER NOT NULL,
    latency BLOB NOT NULL, gone INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (series, width, start)
) STRICT, WITHOUT ROWID;
CREATE INDEX counts_by_age ON counts (width, start);
"""

Sums = tuple[int, int, int, int]
"""Requests, errors, slow ones, and those whose client went away."""
WindowSums = Mapping[int, Mapping[str, Sums]]
"""Window in seconds -> release -> its sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """Requests that arrived from `t` to `t + width_s`. Quantiles have a relative error of at most 1%; None: no request
    was answered. For the other numbers see `Tally`."""

    t: int
    width_s: int
    requests: int
    errors: int
    saved: int
    slow: int
    refused: int
    gone: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesHistory:
    release: str
    arm: str
    points: tuple[HistoryPoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryView:
    """Times without requests have no points. A point is wider than `step_s` where the history is coarser."""

    model: str
    since: float
    until: float
    step_s: int
    series: tuple[SeriesHistory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What one release was asked in one row of the history, over all arms."""

    release: str
    t: int
    width_s: int
    requests: int
    errors: int
    slow: int
    gone: int

    @property
    def sums(self) -> Sums:
        return self.requests, self.errors, self.slow, self.gone


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMinute(Row):
    """A minute of a series on one host. `numbers`: see `NUMBERS`. `latency`: a sketch as text."""

    model: str
    release: str
    arm: str
    start: int
    numbers: tuple[int, ...]
    latency: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHour(Document, form="serin.history_hour"):
    """The minutes of one hour on one host."""

    minutes: tuple[HostMinute, ...] = ()


def history_file(home: Path) -> Database:
    """After a power cut the last batches may be undone, with their place in the log."""
    path = home / "history" / "history.sqlite"
    return Database(path=path, tables=_TABLES, version=_VERSION, durable=False)


def read_history(
    home: Path, model: str, since: float, until: float, step_s: int = 60, *, arms: bool = True
) -> HistoryView | None:
    """Returns a model's requests from `since` to `until`, added up to points of `step_s`, by release and arm (or by
    release alone); None when it has no history."""
    with history_file(home).reading() as book:
        if book is None or not book.execute("SELECT 1 FROM series WHERE model = ?", (model,)).fetchone():
            return None
        rows = book.execute(
            "SELECT s.release, s.arm, c.* FROM series s JOIN counts c ON c.series = s.id"
            " WHERE s.model = ? AND c.start > ? - c.width AND c.start < ? ORDER BY c.start",
            (model, since, until),
        ).fetchall()
    found: dict[tuple[str, str], dict[tuple[int, int], list[sqlite3.Row]]] = {}
    for row in rows:
        width = max(step_s, row["width"])
        place = (row["start"] // width * width, width)
        arm = row["arm"].partition(AT)[0] if arms else ""
        found.setdefault((row["release"], arm), {}).setdefault(place, []).append(row)
    return HistoryView(
        model=model,
        since=since,
        until=until,
        step_s=step_s,
        series=tuple(
            SeriesHistory(
                release=release,
                arm=arm,
                points=tuple(_point(t, width, members) for (t, width), members in sorted(places.items())),
            )
            for (release, arm), places in sorted(found.items())
        ),
    )


def counts_since(home: Path, model: str, since: float) -> list[Count]:
    """Returns the rows of a model's history that end after `since`, oldest first. Cheap: no latencies are read."""
    with history_file(home).reading() as book:
        if book is None:
            return []
        rows = book.execute(
            "SELECT s.release, c.start, c.width, sum(c.requests), sum(c.errors), sum(c.slow), sum(c.gone)"
            " FROM series s JOIN counts c ON c.series = s.id WHERE s.model = ? AND c.start > ? - c.width"
            " GROUP BY s.release, c.start, c.width ORDER BY c.start",
            (model, since),
        )
        names = ("release", "t", "width_s", "requests", "errors", "slow", "gone")
        return [Count(**dict(zip(names, row, strict=True))) for row in rows]


def window_sums(home: Path, model: str, now: float, windows: Sequence[int]) -> WindowSums:
    """Returns the sums of each release in the last `windows` seconds before `now`.

    Rows that begin within the window count: so it is exact to a minute, and to an hour at the end of 30 days.
    """
    sums = ", ".join(
        f"sum(c.{name} * (c.start >= {now - window:.3f}))"
        for window in windows
        for name in ("requests", "errors", "slow", "gone")
    )
    found: dict[int, dict[str, Sums]] = {window: {} for window in windows}
    with history_file(home).reading() as book:
        if book is None:
            return found
        rows = book.execute(
            f"SELECT s.release, {sums} FROM series s JOIN counts c ON c.series = s.id"  # noqa: S608 (numbers only)
            " WHERE s.model = ? AND c.start >= ? AND c.start <= ? GROUP BY s.release",
            (model, now - max(windows), now),
        )
        for release, *numbers in rows:
            for place, window in enumerate(windows):
                requests, errors, slow, gone = numbers[4 * place : 4 * place + 4]
                found[window][release] = (requests, errors, slow, gone)
    return found


def minutes_of(home: Path, since: int, until: int) -> list[HostMinute]:
    """Returns the minutes from `since` to before `until`, for another host that adds them up."""
    with history_file(home).reading() as book:
        if book is None:
            return []
        rows = book.execute(
            f"SELECT s.model, s.release, s.arm, c.start, c.{', c.'.join(NUMBERS)}, c.latency"  # noqa: S608 (names only)
            " FROM series s JOIN counts c ON c.series = s.id"
            " WHERE c.width = 60 AND c.start >= ? AND c.start < ? ORDER BY c.start, s.id",
            (since, until),
        )
        return [
            HostMinute(
                model=row["model"],
                release=row["release"],
                arm=row["arm"],
                start=row["start"],
                numbers=tuple(row[name] for name in NUMBERS),
                latency=b64encode(row["latency"]).decode(),
            )
            for row in rows
        ]


def hours_counted(home: Path) -> list[int]:
    """Returns the beginnings of the hours of which minutes are counted."""
    with history_file(home).reading() as book:
        if book is None:
            return []
        rows = book.execute("SELECT DISTINCT start / 3600 * 3600 FROM counts WHERE width = 60 ORDER BY 1")
        return [int(start) for (start,) in rows]


def first_counted(home: Path, model: str) -> int | None:
    """Returns the beginning of a model's history; None when it has none."""
    with history_file(home).reading() as book:
        if book is None:
            return None
        (found,) = book.execute(
            "SELECT min((SELECT min(start) FROM counts WHERE series = s.id)) FROM series s WHERE s.model = ?",
            (model,),
        ).fetchone()
        return None if found is None else int(found)


def models_with_history(home: Path) -> list[str]:
    with history_file(home).reading() as book:
        if book is None:
            return []
        return [row["model"] for row in book.execute("SELECT DISTINCT model FROM series ORDER BY model")]


def _point(t: int, width: int, rows: Iterable[sqlite3.Row]) -> HistoryPoint:
    from serin.monitoring.history.sketch import merge, quantiles_ms, unpack  # with numpy

    members = list(rows)
    p50, p95, p99 = quantiles_ms(merge([unpack(row["latency"]) for row in members]), _QUANTILES)
    sums = {name: sum(row[name] for row in members) for name in NUMBERS}
    return HistoryPoint(t=t, width_s=width, p50_ms=p50, p95_ms=p95, p99_ms=p99, **sums)
