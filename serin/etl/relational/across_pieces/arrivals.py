"""Windows with `source: online`: the rows of the table as they arrived, one after the other.

The rule, which `serin/windows/` follows while a model is served (docs/how-to/online-windows.md):

- A row without a key, a time or an id, or that arrives more than `max_late` after or `max_future` before its time, gets
  nulls and is not counted.
- Every other row gets the windows of the events that were counted before it arrived.
- It is counted itself when it is not more than `delay` older than the newest event of its key, and no event with the
  same key, time and id was counted before.

An event that is counted after a row can therefore not be one that the row should have seen, so that all rows can be
computed at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from serin.columns.column import Column
from serin.errors import ColumnUnusable
from serin.etl.relational.across_pieces.rolling import Window
from serin.etl.relational.groups import Int64, Timeline, group_codes, key_hashes
from serin.formats.schema import INT64_NULL
from serin.formats.windows import ARRIVAL, MOST_EVENTS, ROW
from serin.spec.relation import EventsSpec, WindowSpec

_US = 1_000_000
HISTORY_ROWS = 4096


def look_back_online(
    spec: WindowSpec, events: EventsSpec, columns: Mapping[str, Column], times: Int64
) -> dict[str, Column]:
    """The window's columns for all rows, on the host. DataError when a sum of integers does not fit in 64 bits, or more
    events of a key would have to be kept than a served model keeps."""
    assert spec.span is not None, "the spec refuses others"
    arrival = arrivals(events, columns, times)
    delay, span = round(spec.delay * _US), round(spec.span * _US)
    late, future = round(events.max_late * _US), round(events.max_future * _US)
    asks = (times != INT64_NULL) & (times >= arrival - late) & (times <= arrival + future)
    for name in (*spec.by, events.id):
        asks &= ~columns[name].null
    order = np.argsort(arrival, kind="stable")
    rows = order[asks[order]]
    groups, moments = group_codes([columns[key][rows] for key in spec.by]), times[rows]
    past = np.flatnonzero(_counted(groups, moments, columns[events.id][rows], delay))
    line = Timeline(groups[past], moments[past])
    _refuse_crowds(spec, line, groups[past], moments[past], late + future + delay + span)
    ends = moments - delay
    stop = np.maximum(line.before(groups, ends), line.starts(groups))
    start = np.minimum(np.maximum(line.starts(groups), line.before(groups, ends - span)), stop)
    window = Window(start=start, stop=stop, first=start)  # a lag does not look further than the span
    place = np.full(len(times), -1, np.int64)
    place[rows] = np.arange(len(rows))
    made = window.columns(spec, columns, rows[past][line.order])
    return {name: column.take_or_null(place) for name, column in made.items()}


def arrivals(events: EventsSpec, columns: Mapping[str, Column], times: Int64) -> Int64:
    """When each row became known: at its own time where nothing else is said."""
    if events.arrival is None:
        return times
    known = columns[events.arrival].values
    return np.where(known == INT64_NULL, times, known)


def _counted(groups: Int64, moments: Int64, ids: Column, delay: int) -> npt.NDArray[np.bool_]:
    """Which rows, in the order of arrival, are counted."""
    distinct, rank = np.unique(moments, return_inverse=True)
    width = len(distinct) + 1
    order = np.argsort(groups, kind="stable")
    level = groups[order] * width + rank[order] + 1
    before = np.concatenate([np.full(min(1, len(order)), -1), np.maximum.accumulate(level)[:-1]])
    newest = np.where(before // width == groups[order], before % width, 0)  # 0: none
    known = newest > 0
    late = np.zeros(len(order), bool)
    late[order[known]] = moments[order[known]] < distinct[newest[known] - 1] - delay
    places = np.flatnonzero(~late)
    same = group_codes([Column(kind="int", values=groups), Column(kind="int", values=moments), ids])[places]
    counted = np.zeros(len(order), bool)
    counted[places[np.unique(same, return_index=True)[1]]] = True
    return counted


def _refuse_crowds(spec: WindowSpec, line: Timeline, groups: Int64, moments: Int64, kept_us: int) -> None:
    """Refuses a table in which a key has more events than are kept of it."""
    kept = line.before(groups, moments, inclusive=True) - np.maximum(
        line.starts(groups), line.before(groups, moments - kept_us)
    )
    most = int(kept.max()) if len(kept) else 0
    if most > MOST_EVENTS:
        raise ColumnUnusable(
            column=next(iter(spec.make)),
            problem=f"a window by {', '.join(spec.by)} would keep {most:,} events of one key, and source: online keeps "
            f"{MOST_EVENTS:,}; use a shorter span or a finer key, or source: request",
        )


class History:
    """Collects all rows of a few keys, chosen by the hashes of the keys, so that the choice does not depend on how the
    rows are partitioned."""

    def __init__(self, spec: WindowSpec) -> None:
        self._spec = spec
        self._parts: list[tuple[npt.NDArray[np.uint32], pa.Table]] = []

    def add(
        self,
        columns: Mapping[str, Column],
        made: Mapping[str, Column],
        rows: Int64,
        arrival: Int64,
    ) -> None:
        """Adds rows of one part of the keys. Rows of a key are all in one part."""
        hashes = key_hashes([columns[key] for key in self._spec.by])
        chosen = np.flatnonzero(hashes <= _largest_hash(hashes))
        table = {name: pa.array(column[chosen].to_wire()) for name, column in {**columns, **made}.items()}
        table |= {ARRIVAL: pa.array(arrival[chosen]), ROW: pa.array(rows[chosen])}
        self._parts.append((hashes[chosen], pa.table(table)))

    def write_next(self, folder: Path) -> None:
        """Writes the rows in the order of arrival to the next file of the folder."""
        hashes = np.concatenate([hashes for hashes, _ in self._parts])
        table = pa.concat_tables([table for _, table in self._parts])
        table = table.filter(pa.array(hashes <= _largest_hash(hashes)))
        folder.mkdir(exist_ok=True)
        path = folder / f"{len(list(folder.iterdir()))}.parquet"
        pq.write_table(table.sort_by([(ARRIVAL, "ascending"), (ROW, "ascending")]), path)


def _largest_hash(hashes: npt.NDArray[np.uint32]) -> int:
    """The largest of the hashes below which there are at most HISTORY_ROWS rows; the smallest where that is none."""
    ordered = np.sort(hashes)
    if len(ordered) <= HISTORY_ROWS:
        return 2**32 - 1
    below = np.flatnonzero(ordered[:-1] != ordered[1:]) + 1  # how many rows each smaller hash takes
    fitting = below[below <= HISTORY_ROWS]
    return int(ordered[(fitting[-1] if len(fitting) else 1) - 1])
