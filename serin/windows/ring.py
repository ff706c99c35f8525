"""The kept events of one key, as bytes: a header, then the times, the ids and each column of values.

Events are in the order of (time, arrival). A number of floats is summed as integers and rounded once, so that the
result has the bits of the ETL's (columns/exact.py). Pure.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass
from math import isfinite, isnan, ldexp
from typing import Any

from serin.columns.exact import SMALLEST
from serin.formats.schema import INT64_NULL, Kind
from serin.formats.windows import MOST_EVENTS, OnlineColumn, OnlineWindow

Value = int | float | None

_HEAD = struct.Struct("<2sHIIqq")  # mark, version, checksum, events, time of the newest lost event, expiry
_MARK, _VERSION = b"SW", 1
CODES: dict[Kind, Any] = {"float": "f", "int": "q", "timestamp": "q", "bool": "b"}
"""How a value is stored and sent."""
_KEPT_BITS = 40
_INT64_MOST = 2**63 - 1


class RingUnreadable(ValueError):
    """Bytes that are not the events of a key."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ring:
    """`lost`: the time of the newest event that was given up because there were too many; INT64_NULL: none. `expires`:
    when nothing in it can be seen any more. Times are in microseconds since 1970."""

    lost: int
    expires: int
    times: Sequence[int]
    ids: Sequence[int]
    values: tuple[Sequence[Any], ...]

    @classmethod
    def read(cls, content: bytes | None, kinds: Sequence[Kind]) -> Ring:
        """The events of a key; `kinds` of its columns. RingUnreadable when they are not what was written."""
        if content is None:
            return cls(lost=INT64_NULL, expires=0, times=(), ids=(), values=((),) * len(kinds))
        if len(content) < _HEAD.size:
            raise RingUnreadable("it is too short")
        mark, version, checksum, count, lost, expires = _HEAD.unpack_from(content)
        if mark != _MARK or version != _VERSION or checksum != zlib.crc32(memoryview(content)[8:]):
            raise RingUnreadable("its checksum is wrong")
        codes: list[Any] = ["q", "Q", *(CODES[kind] for kind in kinds)]
        if len(content) != _HEAD.size + count * sum(map(struct.calcsize, codes)):
            raise RingUnreadable("its size is wrong")
        view, at, columns = memoryview(content), _HEAD.size, list[Any]()
        for code in codes:
            end = at + count * struct.calcsize(code)
            columns.append(view[at:end].cast(code))
            at = end
        return cls(lost=lost, expires=expires, times=columns[0], ids=columns[1], values=tuple(columns[2:]))

    def has(self, time: int, event: int) -> bool:
        first, last = bisect_left(self.times, time), bisect_right(self.times, time)
        return any(self.ids[place] == event for place in range(first, last))

    def with_event(
        self,
        time: int,
        event: int,
        values: Sequence[int | float],
        *,
        oldest: int,
        expires: int,
    ) -> Ring:
        """The events with one more, which is the last of its time. Those before `oldest` are left out, and of too many
        the oldest: that may be the new one."""
        place = bisect_right(self.times, time)
        first = min(bisect_left(self.times, oldest), place)
        columns = [
            [*column[first:place], value, *column[place:]]
            for column, value in zip(
                (self.times, self.ids, *self.values), (time, event, *values), strict=True
            )
        ]
        over = max(len(columns[0]) - MOST_EVENTS, 0)
        lost = max([self.lost, *columns[0][:over]])
        times, ids, *rest = (column[over:] for column in columns)
        return Ring(lost=lost, expires=max(expires, self.expires), times=times, ids=ids, values=tuple(rest))

    def write(self, kinds: Sequence[Kind]) -> bytes:
        codes = ["q", "Q", *(CODES[kind] for kind in kinds)]
        count = len(self.times)
        body = b"".join(
            struct.pack(f"<{count}{code}", *column)
            for code, column in zip(codes, (self.times, self.ids, *self.values), strict=True)
        )
        head = _HEAD.pack(_MARK, _VERSION, 0, count, self.lost, self.expires)
        checksum = zlib.crc32(body, zlib.crc32(head[8:]))
        return _HEAD.pack(_MARK, _VERSION, checksum, count, self.lost, self.expires) + body


def expires_at(content: bytes | memoryview) -> int:
    """When the events of a key may be dropped, in microseconds since 1970; 0 for what is not a ring."""
    return int(_HEAD.unpack_from(content)[5]) if len(content) >= _HEAD.size else 0


def look_back(window: OnlineWindow, ring: Ring, time: int, kinds: Sequence[Kind]) -> dict[str, Value] | None:
    """The window's columns for a row at `time`; None when events were given up that it would have to see. `kinds`: of
    `window.reads`."""
    end = time - window.delay_us
    if ring.lost != INT64_NULL and end - window.span_us <= ring.lost:
        return None
    start, stop = bisect_left(ring.times, end - window.span_us), bisect_left(ring.times, end)
    reads = window.reads
    slices = {
        name: column[start:stop] if stop > start else ()
        for name, column in zip(reads, ring.values, strict=True)
    }
    kind_of = dict(zip(reads, kinds, strict=True))
    return {
        name: stop - start
        if asked.column is None
        else _column(asked, slices[asked.column], kind_of[asked.column])
        for name, asked in window.columns.items()
    }


def _column(asked: OnlineColumn, past: Sequence[Any], kind: Kind) -> Value:
    if asked.function == "lag":
        if len(past) < asked.back:
            return None
        value = past[len(past) - asked.back]
        return None if _is_null(value, kind) else value
    if kind == "float":
        usable = [value for value in past if isfinite(value)]
    else:
        usable = [value for value in past if not _is_null(value, kind)]
    if asked.function == "count":
        return len(usable)
    if not usable:
        return None
    if asked.function == "min":
        least: int | float = min(usable) + 0
        return least
    if asked.function == "max":
        most: int | float = max(usable) + 0
        return most
    if kind == "float":
        total = sum(int(ldexp(value, -SMALLEST)) for value in usable)
        return nearest_float32(total, len(usable) if asked.function == "mean" else 1, SMALLEST)
    total = sum(usable)
    if asked.function == "mean":
        return nearest_float32(total, len(usable), 0)
    return total if -_INT64_MOST <= total <= _INT64_MOST else None


def _is_null(value: Any, kind: Kind) -> bool:
    if kind == "float":
        return isnan(value)
    return bool(value == (-1 if kind == "bool" else INT64_NULL))


def nearest_float32(numerator: int, denominator: int, exponent: int) -> float:
    """The float32 nearest to numerator / denominator * 2^exponent, ties to even, by one rounding: the quotient is cut
    off after 40 bits, and its last bit is set when anything was cut off."""
    size = abs(numerator)
    shift = _KEPT_BITS - (size.bit_length() - denominator.bit_length())
    if shift >= 0:
        quotient, rest = divmod(size << shift, denominator)
    else:
        quotient, rest = divmod(size, denominator << -shift)
    whole = ldexp(float(quotient | (rest != 0)), exponent - shift)
    found = c_float(whole).value
    return -found if numerator < 0 and found else found  # a zero has no sign, as in the ETL
