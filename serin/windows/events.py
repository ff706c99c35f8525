"""Answers rows with their windows and counts them as events, one after the other.

The rule is the ETL's (etl/relational/across_pieces/arrivals.py): who gets nulls, what is counted, what a row sees.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from serin.errors import EventRefused
from serin.formats.nulls import null_of
from serin.formats.schema import InputColumn, Kind
from serin.formats.windows import OnlineWindow, WindowPlan
from serin.windows.ring import Ring, Value, look_back
from serin.windows.state import State

_KEY_BYTES = 16
Outcome = Literal["counted", "repeated", "late", "old", "incomplete", "crowded"]
"""The outcome of a row: `incomplete` lacks a key, a time or an id; `crowded` is one of a key with too many events."""
Rows = Mapping[str, Sequence[Any]]
"""The columns of events, one value per row: strings, integers, floats; None is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """`columns`: the windows of each row, None for null. `outcomes`: how many rows were what, over all windows."""

    columns: dict[str, list[Value]]
    outcomes: Counter[str] = field(default_factory=Counter)


class OnlineWindows:
    """The windows of one model. `state` may hold those of others: their keys begin with the name of the model."""

    def __init__(self, model: str, plan: WindowPlan, state: State) -> None:
        self.plan, self._state = plan, state
        kinds = plan.kinds
        self._windows = [
            _Window(
                window,
                prefix=window_prefix(model, plan, window),
                kinds=tuple(kinds[name] for name in window.reads),
                keep_us=plan.keep_us(window),
            )
            for window in plan.windows
        ]

    def answer(self, rows: Rows, arrival_us: Sequence[int]) -> Answered:
        """The windows of each row, which are stored as events before this returns. EventRefused for a time too far in
        the future; then no row is counted. StateUnavailable when the state cannot be used; then none is, either."""
        self.check_times(rows, arrival_us)
        times, ids = rows[self.plan.time], rows[self.plan.id]
        keyed = [[window.key(rows, place) for place in range(len(times))] for window in self._windows]
        events = [None if each is None else int.from_bytes(_digest([each], 8), "little") for each in ids]
        found = Answered(columns={})

        def change(kept: Mapping[bytes, bytes | None]) -> dict[bytes, bytes | None]:
            found.columns.clear()
            found.outcomes.clear()
            changed: dict[bytes, bytes | None] = {}
            for window, keys in zip(self._windows, keyed, strict=True):
                work = _Work(window, self.plan, kept)
                for place, key in enumerate(keys):
                    work.row(key, times[place], events[place], rows, place, arrival_us[place])
                found.columns.update(work.made)
                found.outcomes.update(work.outcomes)
                changed |= work.changed()
            return changed

        self._state.update(list({key for keys in keyed for key in keys if key is not None}), change)
        return found

    def check_times(self, rows: Rows, arrival_us: Sequence[int]) -> None:
        """EventRefused for the first row whose time is too far in the future."""
        for place, (time, arrival) in enumerate(zip(rows[self.plan.time], arrival_us, strict=True)):
            if time is not None and time > arrival + self.plan.max_future_us:
                raise future_event(self.plan, place, time - arrival)

    def forget(self, rows: Rows) -> int:
        """Drops all events of the keys of these rows, in the windows that are by exactly these columns: one by fewer
        of them holds events of others, too. Returns of how many keys there were any."""
        size = len(next(iter(rows.values())))
        windows = [each for each in self._windows if {*each.window.by} == rows.keys()]
        found = {window.key(rows, place) for window in windows for place in range(size)}
        dropped: set[bytes] = set()

        def change(kept: Mapping[bytes, bytes | None]) -> dict[bytes, bytes | None]:
            dropped.update(key for key, content in kept.items() if content is not None)
            return dict.fromkeys(dropped)

        self._state.update([key for key in found if key is not None], change)
        return len(dropped)


class _Window:
    def __init__(self, window: OnlineWindow, *, prefix: bytes, kinds: Sequence[Kind], keep_us: int) -> None:
        self.window, self.kinds, self.keep_us = window, kinds, keep_us
        self._prefix = prefix
        self._nulls = [null_of(kind) for kind in kinds]

    def key(self, rows: Rows, place: int) -> bytes | None:
        """Where the events of a row's key are kept; None for a row without a key."""
        values = [rows[name][place] for name in self.window.by]
        if any(value is None for value in values):
            return None
        return self._prefix + _digest(values, _KEY_BYTES)

    def values(self, rows: Rows, place: int) -> list[int | float]:
        found = (rows[name][place] for name in self.window.reads)
        return [null if value is None else value for value, null in zip(found, self._nulls, strict=True)]


class _Work:
    """One window over the rows of one call."""

    def __init__(self, window: _Window, plan: WindowPlan, kept: Mapping[bytes, bytes | None]) -> None:
        self._window, self._plan, self._kept = window, plan, kept
        self._rings: dict[bytes, Ring] = {}
        self._dirty: dict[bytes, None] = {}
        self.made: dict[str, list[Value]] = {name: [] for name in window.window.columns}
        self.outcomes: Counter[str] = Counter()

    def row(
        self, key: bytes | None, time: int | None, event: int | None, rows: Rows, place: int, arrival: int
    ) -> None:
        found: dict[str, Value] | None = None
        outcome: Outcome = "incomplete"
        if key is not None and time is not None and event is not None:
            outcome = "old"
            if time >= arrival - self._plan.max_late_us:
                ring = self._ring(key)
                found = look_back(self._window.window, ring, time, self._window.kinds)
                outcome = self._count(ring, key, time, event, rows, place, arrival)
                if found is None:
                    outcome = "crowded"
        self.outcomes[outcome] += 1
        for name, values in self.made.items():
            values.append(None if found is None else found[name])

    def changed(self) -> Iterator[tuple[bytes, bytes]]:
        return ((key, self._rings[key].write(self._window.kinds)) for key in self._dirty)

    def _ring(self, key: bytes) -> Ring:
        if key not in self._rings:
            self._rings[key] = Ring.read(self._kept[key], self._window.kinds)
        return self._rings[key]

    def _count(
        self, ring: Ring, key: bytes, time: int, event: int, rows: Rows, place: int, arrival: int
    ) -> Outcome:
        if ring.times and ring.has(time, event):
            return "repeated"
        if ring.times and time < ring.times[-1] - self._window.window.delay_us:
            return "late"
        keep_us = self._window.keep_us
        self._rings[key] = ring.with_event(
            time,
            event,
            self._window.values(rows, place),
            oldest=arrival - keep_us,
            expires=time + keep_us,
        )
        self._dirty[key] = None
        return "counted"


def future_event(plan: WindowPlan, row: int, ahead_us: int) -> EventRefused:
    """The refusal of an event whose time is too far in the future."""
    reason = f"its {plan.time!r} is {ahead_us / 1e6:,.0f} s in the future; check the clock"
    return EventRefused(row=row, reason=reason)


def window_prefix(model: str, plan: WindowPlan, window: OnlineWindow) -> bytes:
    """What the keys of a window's events begin with."""
    return model.encode() + b"\0" + plan.mark(window)


def window_key(model: str, plan: WindowPlan, window: OnlineWindow, values: Sequence[Any]) -> bytes:
    """Where the events of the key with these values are kept."""
    return window_prefix(model, plan, window) + _digest(values, _KEY_BYTES)


def event_rows(inputs: Sequence[InputColumn], arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The columns of events out of arrays in wire form, strings as `str`; with None for what is null."""
    return {column.name: with_nulls(arrays[column.name].reshape(-1).tolist(), column) for column in inputs}


def with_nulls(values: Sequence[Any], column: InputColumn) -> list[Any]:
    """Values in wire form, with None for null."""
    if column.kind == "string":
        nulls = {"", *column.null_texts}
        return [None if value in nulls else value for value in values]
    if column.kind == "float":
        return [None if value != value else value for value in values]
    null = null_of(column.kind)
    return [None if value == null else value for value in values]


def _digest(values: Sequence[Any], size: int) -> bytes:
    """The same for equal values of equal kinds."""
    digest = hashlib.blake2b(digest_size=size)
    for value in values:
        content = value.encode() if isinstance(value, str) else int(value).to_bytes(8, "little", signed=True)
        digest.update(len(content).to_bytes(4, "little"))
        digest.update(content)
    return digest.digest()
