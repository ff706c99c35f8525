"""Draws recorded requests of a live version for a replay: a bounded sample, half of it from the newest hour.

Parts of the records are numbered as they are written. A sample is drawn from the parts of one window of numbers, in an
order that only depends on the requests' ids, so a replay can continue where it was. When the sample is used up, the
next window begins where the last one ended: no request is drawn twice.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.formats.captures import Part, hour_began, open_part
from serin.formats.wire import Array
from serin.machine.typed_json import Document
from serin.monitoring.capture.read import alike, parts
from serin.store.artifacts import Release

_DAYS_S: Final = 7 * 86_400.0  # older requests are not typical any more
_HOURS: Final = 12  # the most that a sample is drawn from
_MOST_ROWS: Final = 50_000
_TIMES: Final = 4  # rows to read for each that is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Document):
    """Where a replay is: in the window of parts after `after` up to `until`, past the requests up to `lot`."""

    after: str | None = None
    until: str | None = None  # None: no window was drawn yet
    lot: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Requests in the order in which they are sent. Request i is the rows `starts[i]` to `starts[i + 1]` of `table`."""

    table: pa.Table
    starts: Array
    lots: tuple[int, ...]
    place: Place

    def __len__(self) -> int:
        return len(self.lots)

    def after(self, count: int) -> Place:
        """The place once the first `count` requests are done."""
        lot = self.lots[count - 1] if count else self.place.lot
        return Place(after=self.place.after, until=self.place.until, lot=lot)


def draw(home: Path, live: Release, place: Place, *, rows: int, now: float | None = None) -> Sample | None:
    """Returns what is left of the place's window, or a sample of the next one; None: nothing new is recorded."""
    oldest = (time.time() if now is None else now) - _DAYS_S
    if place.until is not None:
        left = _sample(home, live, place, rows, oldest)
        if left is not None:
            return left
        place = Place(after=place.until)
    newest = max((part.sequence for part in parts(home, live.model, after=place.after)), default=None)
    return (
        None if newest is None else _sample(home, live, Place(after=place.after, until=newest), rows, oldest)
    )


def _sample(home: Path, live: Release, place: Place, rows: int, oldest: float) -> Sample | None:
    assert place.until is not None
    found = [
        part
        for part in parts(home, live.model, after=place.after)
        if part.version == live.version and part.sequence <= place.until and hour_began(part.hour) >= oldest
    ]
    tables = list(_of_hours(found, live, min(rows, _MOST_ROWS)))
    if not tables:
        return None
    table = alike(tables)
    table = table.filter(pc.greater(table.column(_LOT), place.lot)).sort_by(
        [(_LOT, "ascending"), ("_row", "ascending")]
    )
    if not table.num_rows:
        return None
    lots = table.column(_LOT).to_numpy()
    starts = np.flatnonzero(np.diff(lots, prepend=-1, append=-1))
    return Sample(table=table, starts=starts, lots=tuple(int(lot) for lot in lots[starts[:-1]]), place=place)


_LOT: Final = "_lot"


def _of_hours(found: Sequence[Part], live: Release, rows: int) -> Iterator[pa.Table]:
    """Draws from the newest hour first, and what it lacks from the others."""
    hours = sorted({part.hour for part in found}, reverse=True)
    if len(hours) > _HOURS:
        others = np.linspace(1, len(hours) - 1, _HOURS - 1).round().astype(int)
        hours = [hours[0], *(hours[place] for place in others)]
    left = rows
    for number, hour in enumerate(hours):
        share = 2 if number == 0 and len(hours) > 1 else len(hours) - number
        quota = -(-left // share)
        table = _of_hour([part for part in found if part.hour == hour], live, quota)
        if table is not None:
            left -= table.num_rows
            yield table
        if left <= 0:
            return


def _of_hour(found: Sequence[Part], live: Release, quota: int) -> pa.Table | None:
    """Returns complete requests with about `quota` rows, drawn by lot from the newest rows of an hour."""
    tables, have = [], 0
    for part in reversed(found):
        if have >= _TIMES * quota:
            break
        table = _newest(part, _TIMES * quota - have)
        if table is not None:
            table = _complete(table, live)
            tables.append(table)
            have += table.num_rows
    if not have:
        return None
    table = alike(tables)
    lots = _lots(table.column("_id"))
    up_to = np.sort(lots)[min(quota, len(lots)) - 1]
    drawn = lots <= up_to  # whole requests: the rows of one have the same lot
    return table.append_column(_LOT, pa.array(lots)).filter(pa.array(drawn))


def _newest(part: Part, rows: int) -> pa.Table | None:
    """Reads the last row groups of a part, as many as hold `rows`; None: it was merged or deleted in the meantime."""
    try:
        with open_part(part.path) as file:
            groups, have = [], 0
            for group in reversed(range(file.num_row_groups)):
                groups.append(group)
                have += file.metadata.row_group(group).num_rows
                if have >= min(rows, part.rows):
                    break
            table = file.read_row_groups(sorted(groups))
    except FileNotFoundError:
        return None
    table = table.replace_schema_metadata(None)
    return table.slice(max(table.num_rows - part.rows, 0))


def _complete(table: pa.Table, live: Release) -> pa.Table:
    """Keeps requests of clients that `live` answered and whose first row was read as well."""
    kept = pc.and_(
        pc.fill_null(pc.equal(table.column("_source"), "live"), True),
        pc.and_(
            pc.fill_null(pc.equal(table.column("_release"), live.name), True),
            pc.fill_null(pc.equal(table.column("_status"), 200), True),
        ),
    )
    table = table.filter(kept)
    first = table.filter(pc.equal(table.column("_row"), 0)).column("_id")
    return table.filter(pc.is_in(table.column("_id"), value_set=first.combine_chunks()))


def _lots(ids: pa.ChunkedArray) -> Array:
    """A number for each id, evenly spread and below 2^63."""
    coded = ids.combine_chunks().dictionary_encode()
    drawn = [
        int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
        for text in coded.dictionary.to_pylist()
    ]
    lots: Array = np.array(drawn, dtype=np.int64)[coded.indices.to_numpy()]
    return lots
