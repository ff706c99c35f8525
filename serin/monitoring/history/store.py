"""The history of requests, `<home>/history/history.sqlite`: counts and latencies by model, release, arm and time.

A row covers a minute in the last two days, ten minutes in the last week, an hour in the last 31 days. Only times with
requests have rows. The place in the request log is stored in the same transaction as its counts, so each line counts
exactly once, also after a kill.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from serin.formats.serving.request_log import START, Offset, read_requests
from serin.machine.databases import transaction
from serin.monitoring.history.read import AT, NUMBERS, HostMinute, history_file
from serin.monitoring.history.sketch import MINUTE_S, LimitMs, Series, Tally, merge, pack, tally, unpack

log = logging.getLogger(__name__)

DAY_S: Final = 86_400
KEPT_S: Final = 31 * DAY_S
# Rows of at most this width, once they are older than that, are added up to rows of the next width.
LEVELS: Final = ((MINUTE_S, 2 * DAY_S, 600), (600, 7 * DAY_S, 3_600))

# The most that one call forgets: a clock that is wrong for a while destroys little.
_FORGOTTEN_S: Final = 3_600
_ROLLED_S: Final = 6 * 3_600  # the most that one call adds up
_BATCH_BYTES: Final = 4 << 20


class History:
    """The writer of the history; the watcher has the only one."""

    def __init__(self, home: Path) -> None:
        self._db = history_file(home).open()
        self._ids: dict[Series, int] = {
            Series(row["model"], row["release"], row["arm"]): row["id"]
            for row in self._db.execute("SELECT * FROM series")
        }

    def close(self) -> None:
        self._db.close()

    def read_log(self, path: Path, limit_ms: LimitMs) -> tuple[int, bool]:
        """Counts the next lines of a request log. Returns how many requests, and whether there are more lines."""
        batch = read_requests(path, self._offset(), max_bytes=_BATCH_BYTES)
        if batch.offset == self._offset():
            return 0, False
        counted = tally(batch.requests, limit_ms)
        with self._transaction():
            self._add(counted)
            offset = json.dumps(batch.offset.to_json())
            self._db.execute("INSERT OR REPLACE INTO state VALUES ('offset', ?)", (offset,))
        if batch.bad_lines:
            log.warning("%d lines of %s could not be read and are not counted", batch.bad_lines, path)
        return len(batch.requests), batch.more

    def taken(self, host: str) -> str:
        """Returns the last hour of a host that is complete; empty: none is."""
        row = self._db.execute("SELECT value FROM state WHERE name = ?", (f"taken {host}",)).fetchone()
        return "" if row is None else str(row["value"])

    def take(self, host: str, minutes: Iterable[HostMinute], *, complete: str | None) -> None:
        """Counts the minutes of another host, in the place of what it reported of them before. `complete`: their hour,
        if the host adds nothing to it any more."""
        with self._transaction():
            for each in minutes:
                series = self._id(Series(each.model, each.release, f"{each.arm}{AT}{host}"))
                latency = base64.b64decode(each.latency)
                self._write(series, MINUTE_S, each.start, each.numbers, latency)
            if complete is not None:
                self._db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (f"taken {host}", complete))

    def tidy(self, now: float) -> None:
        """Adds up old rows to wider ones, and forgets what is older than 31 days, some hours of it at a time."""
        for width, age_s, wider in LEVELS:
            self._roll_up(width, int(now - age_s) // wider * wider, wider)
        with self._transaction():
            oldest = self._oldest(LEVELS[-1][2])
            end = min(int(now) - KEPT_S, (oldest or 0) + _FORGOTTEN_S)
            if oldest is not None and oldest < end:
                for width in (MINUTE_S, *(wider for _, _, wider in LEVELS)):  # so that the index is used
                    self._db.execute("DELETE FROM counts WHERE width = ? AND start < ?", (width, end))
                self._db.execute("DELETE FROM series WHERE id NOT IN (SELECT DISTINCT series FROM counts)")
                self._ids.clear()

    def _roll_up(self, width: int, end: int, wider: int) -> None:
        """Replaces rows of `width` that start before `end` by rows of `wider`."""
        oldest = self._oldest(width)
        if oldest is None or oldest >= end:
            return
        end = min(end, (oldest + _ROLLED_S) // wider * wider)
        with self._transaction():
            rows = self._db.execute(
                "SELECT * FROM counts WHERE width = ? AND start < ? ORDER BY series, start", (width, end)
            ).fetchall()
            self._db.execute("DELETE FROM counts WHERE width = ? AND start < ?", (width, end))
            groups: dict[tuple[int, int], list[sqlite3.Row]] = {}
            for row in rows:
                groups.setdefault((row["series"], row["start"] // wider * wider), []).append(row)
            for (series, start), members in groups.items():
                self._merge_in(series, wider, start, members)

    def _add(self, counted: Mapping[tuple[Series, int], Tally]) -> None:
        """A minute that was added up already (a late line, a clock that was set back) gets another row."""
        for (series, start), found in counted.items():
            numbers = {name: getattr(found, name) for name in NUMBERS}
            row = {**numbers, "latency": pack(found.latency)}
            self._merge_in(self._id(series), MINUTE_S, start, [row])

    def _merge_in(self, series: int, width: int, start: int, members: Sequence[Any]) -> None:
        present = self._db.execute(
            "SELECT * FROM counts WHERE series = ? AND width = ? AND start = ?", (series, width, start)
        ).fetchall()
        rows = [*present, *members]
        sums = [sum(row[name] for row in rows) for name in NUMBERS]
        self._write(series, width, start, sums, pack(merge([unpack(row["latency"]) for row in rows])))

    def _write(self, series: int, width: int, start: int, numbers: Sequence[int], latency: bytes) -> None:
        self._db.execute(
            f"INSERT OR REPLACE INTO counts (series, width, start, {', '.join(NUMBERS)}, latency)"  # noqa: S608
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (series, width, start, *numbers, latency),
        )

    def _id(self, series: Series) -> int:
        if series not in self._ids:
            self._db.execute("INSERT OR IGNORE INTO series (model, release, arm) VALUES (?, ?, ?)", series)
            (self._ids[series],) = self._db.execute(
                "SELECT id FROM series WHERE model = ? AND release = ? AND arm = ?", series
            ).fetchone()
        return self._ids[series]

    def _oldest(self, width: int) -> int | None:
        (found,) = self._db.execute("SELECT min(start) FROM counts WHERE width = ?", (width,)).fetchone()
        return None if found is None else int(found)

    def _offset(self) -> Offset:
        row = self._db.execute("SELECT value FROM state WHERE name = 'offset'").fetchone()
        return START if row is None else Offset.from_json(json.loads(row["value"]))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            with transaction(self._db):
                yield
        except BaseException:
            self._ids.clear()  # ids that were given in it are gone
            raise
