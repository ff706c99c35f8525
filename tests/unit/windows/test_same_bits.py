"""Events that are replayed one by one give the windows that the ETL computes for the whole table, bit by bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from serin.columns.column import Column
from serin.etl.relational.across_pieces.arrivals import arrivals, look_back_online
from serin.formats.nulls import null_of
from serin.formats.schema import DTYPE_OF_KIND, INT64_NULL, InputColumn, Kind
from serin.formats.windows import MOST_EVENTS, OnlineColumn, OnlineWindow, WindowPlan
from serin.spec.relation import EventsSpec, WindowSpec
from serin.windows import ring as ring_module
from serin.windows.events import OnlineWindows, event_rows
from serin.windows.ring import Ring, look_back
from serin.windows.state import MemoryState, State

_KINDS: Mapping[str, Kind] = {
    "card": "string", "shop": "int", "at": "timestamp", "known": "timestamp", "id": "int", "x": "float", "n": "int",
    "flag": "bool", "seen": "timestamp",
}  # fmt: skip
_MAKE = {
    "events": "count()", "count_x": "count(x)", "sum_x": "sum(x)", "mean_x": "mean(x)", "min_x": "min(x)",
    "max_x": "max(x)", "lag_x": "lag(x)", "lag_2": "lag(x, 2)", "sum_n": "sum(n)", "mean_n": "mean(n)",
    "min_n": "min(n)", "lag_n": "lag(n, 3)", "sum_flag": "sum(flag)", "max_flag": "max(flag)", "last_flag": "lag(flag)",
    "first_seen": "min(seen)", "last_seen": "lag(seen)",
}  # fmt: skip
_SECOND = 1_000_000
# 2026-03-29 00:59:30 UTC: half a minute before clocks in Europe are moved forward, and 90 s before 2026-10-25 01:00.
_CLOCKS = (1_774_745_970 * _SECOND, 1_792_889_910 * _SECOND)

_FLOATS = (0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, float("inf"), float("nan"), 16777217.0, 0.1, -7.25)


def _table(draw: random.Random) -> dict[str, Any]:
    """A few keys, moments and ids, so that many are equal; nulls and late rows among them."""
    start, spread = draw.choice(_CLOCKS), draw.choice([3, 30, 90])

    def number() -> int:
        return draw.choice([INT64_NULL, draw.randint(-(2**40), 2**40), draw.randint(-3, 3)])

    def value() -> float:
        bits = np.uint32(draw.getrandbits(32)).view(np.float32)
        return float(draw.choice([draw.choice(_FLOATS), float(bits), draw.uniform(-100, 100)]))

    rows = [
        {
            "card": draw.choice(["a", "a", "b", None]),
            "shop": draw.choice([1, 1, 2, INT64_NULL]),
            "at": draw.choice([start + draw.randint(0, spread) * _SECOND] * 9 + [INT64_NULL]),
            "late": draw.choice([0, 0, 0, 1, 4, 30, -3, -20, None]),
            "id": draw.choice([draw.randint(0, 3), draw.randint(0, 99), INT64_NULL]),
            "x": value(),
            "n": number(),
            "flag": draw.choice([-1, 0, 1]),
            "seen": number(),
        }
        for _ in range(draw.randint(0, 50))
    ]
    return {name: [row[name] for row in rows] for name in (*_KINDS, "late") if name != "known"}


def _columns(table: Mapping[str, Any]) -> dict[str, Column]:
    at, late = table["at"], table["late"]
    known = [
        INT64_NULL if by is None or time == INT64_NULL else time + by * _SECOND
        for time, by in zip(at, late, strict=True)
    ]
    texts = pa.array(["a", "b"])
    codes = [{"a": 0, "b": 1, None: -1}[card] for card in table["card"]]
    found = {"card": Column(kind="string", values=np.asarray(codes, np.int32), dictionary=texts)}
    dtypes = {"float": np.float32, "bool": np.int8}
    for name, kind in _KINDS.items():
        if name != "card":
            values = known if name == "known" else table[name]
            found[name] = Column(kind=kind, values=np.asarray(values, dtypes.get(kind, np.int64)))
    return found


def _plan(spec: WindowSpec, events: EventsSpec) -> WindowPlan:
    def result(function: str, column: str | None) -> Kind:
        kind = _KINDS[column] if column else "int"
        if function == "mean" or (function == "sum" and kind == "float"):
            return "float"
        return "int" if function in ("count", "sum") else kind

    columns = {
        name: OnlineColumn(
            function=each.function,
            column=each.column,
            back=each.back,
            kind=result(each.function, each.column),
        )
        for name, each in spec.columns.items()
    }
    assert spec.span is not None
    window = OnlineWindow(
        by=spec.by, span_us=round(spec.span * 1e6), delay_us=round(spec.delay * 1e6), columns=columns
    )
    names = dict.fromkeys(("at", "id", *spec.by, *window.reads))
    return WindowPlan(
        time="at",
        id="id",
        max_late_us=round(events.max_late * 1e6),
        max_future_us=round(events.max_future * 1e6),
        unavailable="refuse",
        inputs=tuple(
            InputColumn(name=name, kind=_KINDS[name], dtype=DTYPE_OF_KIND[_KINDS[name]]) for name in names
        ),
        dropped=(),
        windows=(window,),
    )


def _replayed(
    plan: WindowPlan, columns: Mapping[str, Column], arrival: Any, states: Sequence[State], model: str
) -> dict[str, list[Any]]:
    """Each row by itself, in the order of arrival, by one host after the other. One that a server would refuse gets
    nulls."""
    hosts = itertools.cycle([OnlineWindows(model, plan, state) for state in states])
    times = columns["at"].values
    found: dict[str, list[Any]] = {name: [None] * len(times) for name in plan.made}
    for row in np.argsort(arrival, kind="stable"):
        if times[row] != INT64_NULL and times[row] > arrival[row] + plan.max_future_us:
            continue
        wire = {column.name: columns[column.name][row : row + 1].to_wire() for column in plan.inputs}
        answered = next(hosts).answer(event_rows(plan.inputs, wire), [int(arrival[row])])
        for name, values in answered.columns.items():
            found[name][row] = values[0]
    return found


def _bits(kind: Kind, values: Any) -> list[Any]:
    dtype = {"float": np.float32, "bool": np.int8}.get(kind, np.int64)
    filled = [null_of(kind) if value is None else value for value in values]
    array = np.asarray(filled, dtype)
    if kind == "float":
        return [
            None if np.isnan(value) else int(bits)
            for value, bits in zip(array, array.view(np.int32), strict=True)
        ]
    return array.tolist()


HISTORIES = 600


@pytest.mark.parametrize("part", range(4))
def test_replayed_events_have_the_windows_of_the_etl(part: int) -> None:
    for seed in range(part, HISTORIES, 4):
        check_history(seed, [MemoryState()])


def check_history(seed: int, states: Sequence[State]) -> None:
    """Replays a random table; `states` are connections of several hosts to one state."""
    draw = random.Random(seed)
    columns = _columns(_table(draw))
    spec = WindowSpec(
        by=draw.choice([("card",), ("shop",), ("card", "shop")]),
        span=draw.choice([1, 7, 30, 120]),
        delay=draw.choice([0, 0, 1, 5]),
        make=_MAKE,
        source="online",
    )
    events = EventsSpec(
        id="id", arrival=draw.choice(["known", None]), max_late=draw.choice([2, 40]), max_future=10
    )
    times = columns["at"].values
    wanted, plan = look_back_online(spec, events, columns, times), _plan(spec, events)
    found = _replayed(plan, columns, arrivals(events, columns, times), states, f"m{seed}")
    for name, column in wanted.items():
        assert column.kind == plan.made[name].kind
        assert _bits(column.kind, found[name]) == _bits(column.kind, column.values), (seed, name)


def test_rows_of_one_request_are_events_one_after_the_other() -> None:
    spec = WindowSpec(by=("card",), span=60, make={"events": "count()", "sum_x": "sum(x)"}, source="online")
    plan = _plan(spec, EventsSpec(id="id"))
    start = _CLOCKS[0]
    rows = {"at": [start, start + 1, start + 2], "id": [1, 2, 3], "card": ["a"] * 3, "x": [0.5, 0.25, 1.0]}
    answered = OnlineWindows("m", plan, MemoryState()).answer(rows, [start + 2] * 3)
    assert answered.columns == {"events": [0, 1, 2], "sum_x": [None, 0.5, 0.75]}
    assert answered.outcomes == {"counted": 3}


@pytest.mark.parametrize("times", [2, 3])
def test_an_event_that_is_sent_again_counts_once_and_gets_the_same_windows(times: int) -> None:
    spec = WindowSpec(by=("card",), span=60, make={"events": "count()"}, source="online")
    windows, start = OnlineWindows("m", _plan(spec, EventsSpec(id="id")), MemoryState()), _CLOCKS[0]
    row = {"at": [start], "id": [1], "card": ["a"]}
    for _ in range(times):
        assert windows.answer(row, [start]).columns == {"events": [0]}
    later = {"at": [start + 1], "id": [2], "card": ["a"]}
    assert windows.answer(later, [start + 1]).columns == {"events": [1]}
    assert windows.answer(row, [start + 2]).columns == {"events": [0]}


def test_a_key_whose_events_come_newest_first_keeps_no_more_than_the_most() -> None:
    """Each is the oldest so far, and in time: it is older than the newest by less than `delay`."""
    spec = WindowSpec(by=("card",), span=60, delay=1, make={"events": "count()"}, source="online")
    (window,) = _plan(spec, EventsSpec(id="id")).windows
    ring, start = Ring.read(None, []), _CLOCKS[0]
    for event in range(MOST_EVENTS + 904):
        ring = ring.with_event(start - event, event, [], oldest=0, expires=0)
    assert list(ring.times) == list(range(start - MOST_EVENTS + 1, start + 1))
    assert ring.lost == start - MOST_EVENTS  # the newest of those that were given up
    sees_it = ring.lost + window.delay_us + window.span_us
    assert look_back(window, ring, sees_it, []) is None
    assert look_back(window, ring, sees_it + 1, []) == {"events": MOST_EVENTS}


@pytest.mark.parametrize("seed", range(20))
def test_a_key_keeps_the_newest_events_in_whatever_order_they_come(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(ring_module, "MOST_EVENTS", 5)
    draw = random.Random(seed)
    times = [draw.randint(0, 9) for _ in range(30)]
    ring = Ring.read(None, [])
    for event, time in enumerate(times):
        ring = ring.with_event(time, event, [], oldest=0, expires=0)
        kept = sorted((time, event) for event, time in enumerate(times[: event + 1]))
        assert list(zip(ring.times, ring.ids, strict=True)) == kept[-5:]
        assert ring.lost == (kept[-6][0] if len(kept) > 5 else INT64_NULL)
