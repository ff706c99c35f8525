"""Reads Envoy's request log (JSON lines) from where the last read ended. Never writes it.

An `Offset` is small and JSON-able, so that it can be journaled and used by another process later. It knows its file
by the first bytes: a log that was truncated, replaced or rotated to `<name>.1` is recognised, and the rest of a
rotated one is read first. The last line counts once its newline is there.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from serin.formats.serving.request import Request
from serin.machine.typed_json import Row

_HEAD_BYTES: Final = 256
_MAX_BYTES: Final = 16 << 20
_NEAR_BYTES: Final = 64 << 10  # a search by time ends when it is this close
_LONGEST_S: Final = 30.0  # lines are in order of completion, so one may be this much older than the next

_fields = itemgetter(*Request._fields)


@dataclass(frozen=True, slots=True)
class Offset(Row):
    """A place in a log: bytes read, and the checksum of the file's first bytes (at most 256 of those read)."""

    bytes: int = 0
    head: int = 0


START: Final = Offset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one read gave. `more`: there are whole lines behind `offset` already."""

    requests: list[Request]
    offset: Offset
    bad_lines: int = 0
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Whole lines, as they are in the log. `more`: there are others behind `offset` already."""

    data: bytes
    offset: Offset
    more: bool = False


def read_requests(path: Path, offset: Offset = START, *, max_bytes: int = _MAX_BYTES) -> Batch:
    """The requests of `read_lines`."""
    lines = read_lines(path, offset, max_bytes=max_bytes)
    requests, bad_lines = parse_requests(lines.data)
    return Batch(requests=requests, offset=lines.offset, bad_lines=bad_lines, more=lines.more)


def read_lines(path: Path, offset: Offset = START, *, max_bytes: int = _MAX_BYTES) -> Lines:
    """The whole lines behind `offset`, at most about `max_bytes` of them. A log that is not there is an empty one."""
    rotated = path.with_name(path.name + ".1")
    if offset.bytes and not _is_of(path, offset):
        if not _is_of(rotated, offset):
            offset = START  # truncated or replaced, and the old file is gone
        elif (lines := _read(rotated, offset, max_bytes)).data:
            return Lines(data=lines.data, offset=lines.offset, more=True)
        elif not path.exists():
            return lines  # moved away, not reopened yet: more lines may still be written to the old file
        else:
            offset = START
    return _read(path, offset, max_bytes)


def read_since(path: Path, t: float) -> list[Request]:
    """Every request that arrived at `t` or later, also from the rotated log."""
    rotated = path.with_name(path.name + ".1")
    return [
        request
        for log in (rotated, path)
        if log.exists()
        for requests in _batches(log, find_offset(log, t))
        for request in requests
        if request.t >= t
    ]


def find_offset(path: Path, t: float) -> Offset:
    """A place at or before the first request that arrived at `t` or later, found without reading the whole log."""
    try:
        with path.open("rb") as log:
            low, high = 0, os.fstat(log.fileno()).st_size
            while high - low > _NEAR_BYTES:
                middle = (low + high) // 2
                arrival, place = _first_arrival(log, middle, high)
                if arrival is None or arrival >= t - _LONGEST_S:
                    high = middle
                else:
                    low = place
            return Offset(low, _head(log, low))
    except FileNotFoundError:
        return START


def _batches(log: Path, offset: Offset) -> Iterator[list[Request]]:
    more = True
    while more:
        lines = _read(log, offset, _MAX_BYTES)
        offset, more = lines.offset, lines.more
        yield parse_requests(lines.data)[0]


def _first_arrival(log: Any, place: int, end: int) -> tuple[float | None, int]:
    """Arrival and place of the first good line that begins behind `place`."""
    log.seek(place)
    log.readline()
    while (place := log.tell()) < end:
        try:
            return float(json.loads(log.readline())["t"]), place
        except (ValueError, TypeError, KeyError):
            continue
    return None, end


def _is_of(path: Path, offset: Offset) -> bool:
    try:
        with path.open("rb") as log:
            return os.fstat(log.fileno()).st_size >= offset.bytes and _head(log, offset.bytes) == offset.head
    except FileNotFoundError:
        return False


def _head(log: Any, read: int) -> int:
    log.seek(0)
    return zlib.crc32(log.read(min(read, _HEAD_BYTES)))


def _read(path: Path, offset: Offset, max_bytes: int) -> Lines:
    try:
        with path.open("rb") as log:
            log.seek(offset.bytes)
            data = log.read(max_bytes)
            more = len(data) == max_bytes
            whole = data.rfind(b"\n") + 1
            if more and not whole:  # one line longer than a read
                data += log.readline()
                whole = len(data) if data.endswith(b"\n") else 0
                more = bool(whole)
            end = offset.bytes + whole
            head = offset.head if offset.bytes >= _HEAD_BYTES else _head(log, end)
    except FileNotFoundError:
        return Lines(data=b"", offset=offset)
    return Lines(data=data[:whole], offset=Offset(end, head), more=more)


def parse_requests(data: bytes) -> tuple[list[Request], int]:
    """The requests in whole lines, and the number of lines that cannot be read."""
    requests: list[Request] = []
    bad_lines = 0
    for row in _rows(data):
        try:
            request = _request(row)
        except (ValueError, TypeError, KeyError):
            bad_lines += 1
            continue
        if request is not None:
            requests.append(request)
    return requests, bad_lines


def _rows(data: bytes) -> list[Any]:
    """One call of the JSON parser for all lines (twice as fast as one each); line by line when one of them is bad."""
    if not data:
        return []
    try:
        rows: list[Any] = json.loads(b"[%b]" % data[:-1].replace(b"\n", b","))
        return rows
    except ValueError:
        return [_row(line) for line in data.split(b"\n")[:-1]]


def _row(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None  # counted as bad by the caller


def _request(row: dict[str, Any]) -> Request | None:
    """None for a request that reached no release (a refused path, an unknown model).

    Envoy writes numbers as strings in places, and null or "-" for what there was not.
    """
    t, model, epoch, arm, release, code, grpc, us, attempts, flags, id_, ms, received_ms = _fields(row)
    if not model or not release or model == "-" or release == "-":
        return None
    return Request(
        float(t),
        model,
        int(float(epoch)),
        arm,
        release,
        int(_number(code) or 0),
        None if (status := _number(grpc)) is None else int(status),
        _number(us),
        int(_number(attempts) or 0),
        flags or "-",
        id_ or "-",
        _number(ms),
        _number(received_ms),
    )


def _number(value: Any) -> float | None:
    if value is None or value == "-" or value == "":
        return None
    return float(value)
