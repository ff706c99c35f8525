"""Events that are pushed as JSON: {"events": [{"card": "a", "at": "2026-11-18T09:30:00Z", ...}, ...]}."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from ctypes import c_float
from datetime import UTC, datetime
from typing import Any

from serin.errors import EventRefused
from serin.formats.schema import INT64_NULL, InputColumn
from serin.formats.windows import WindowPlan

MOST_EVENTS_A_PUSH = 10_000
_AT_ONCE = 100


async def read_pushed(body: bytes, plan: WindowPlan) -> dict[str, list[Any]]:
    """The columns of the events, with None for null. EventRefused names the first event that does not fit. Other
    requests are answered in between."""
    try:
        events = json.loads(body)["events"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EventRefused(row=0, reason='the body is not {"events": [{...}, ...]}') from error
    if not isinstance(events, list) or len(events) > MOST_EVENTS_A_PUSH:
        raise EventRefused(row=0, reason=f"a push is a list of at most {MOST_EVENTS_A_PUSH:,} events")
    rows: dict[str, list[Any]] = {column.name: [] for column in plan.inputs}
    for place, event in enumerate(events):
        for column in plan.inputs:
            rows[column.name].append(_value(event, column, place))
        if place % _AT_ONCE == 0:
            await asyncio.sleep(0)
    return rows


def _value(event: Any, column: InputColumn, place: int) -> Any:
    if not isinstance(event, Mapping):
        raise EventRefused(row=place, reason="it is not an object")
    if column.name not in event:
        raise EventRefused(row=place, reason=f"{column.name!r} is missing; write null where it has no value")
    try:
        return read_value(event[column.name], column)
    except ValueError as error:
        raise EventRefused(row=place, reason=f"{column.name!r} {error}") from error


def read_value(value: Any, column: InputColumn) -> Any:
    """A value of JSON as events have it, None for null. ValueError says what it is not."""
    if value is None:
        return None
    try:
        found = _READ[column.kind](value)
    except (ValueError, TypeError, OverflowError, struct.error) as error:
        raise ValueError(f"is not a {column.kind}") from error
    return None if found != found or found in ("", *column.null_texts) else found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    value.encode()  # ValueError for what is not Unicode
    return value


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    return c_float(value).value


def _int(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    struct.pack("q", value)
    return None if value == INT64_NULL else value


def _bool(value: Any) -> int:
    if not isinstance(value, bool):
        raise TypeError
    return int(value)


def _time(value: Any) -> int | None:
    """Microseconds since 1970, or a time in the form of ISO 8601, in UTC where it names no zone."""
    if isinstance(value, str):
        time = datetime.fromisoformat(value)
        time = time if time.tzinfo else time.replace(tzinfo=UTC)
        since = time - datetime(1970, 1, 1, tzinfo=UTC)
        return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return _int(value)


_READ = {"string": _text, "float": _float, "int": _int, "bool": _bool, "timestamp": _time}
