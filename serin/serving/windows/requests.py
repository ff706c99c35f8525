"""Reads the event columns of an inference request, and writes the request with window columns in their place.

It knows the three forms in which a request travels: JSON, JSON with binary tensors, and the message of gRPC. Columns
that only events have are left out of what is sent to the model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from serin.errors import EventRefused
from serin.formats.nulls import null_of
from serin.formats.schema import DTYPE_OF_KIND, InputColumn, Kind
from serin.formats.windows import WindowPlan
from serin.windows.events import with_nulls
from serin.windows.ring import CODES

MOST_ROWS = 4096  # of one request
_BOOLEANS = frozenset((-1, 0, 1))
_FRAME = struct.Struct(">BI")
_CONTENTS: dict[Kind, str] = {
    "string": "bytes_contents", "float": "fp32_contents", "int": "int64_contents", "timestamp": "int64_contents",
    "bool": "int_contents",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`rows`: the columns of its events, with None for null. `write`: makes the body to send of the windows of all
    rows, and the length of its JSON part, None for a message of gRPC."""

    rows: dict[str, list[Any]]
    write: Callable[[Mapping[str, Sequence[Any]]], tuple[bytes, int | None]]


def read_http(body: bytes, json_bytes: int | None, plan: WindowPlan) -> Request:
    """EventRefused for a request without the right columns."""
    end = len(body) if json_bytes is None else json_bytes
    try:
        head = json.loads(body[:end])
        entries = {entry["name"]: entry for entry in head["inputs"]}
        binary, at = dict[str, bytes](), end
        for name, entry in entries.items():
            size = entry.get("parameters", {}).get("binary_data_size")
            if size is not None:
                binary[name] = body[at : at + size]
                at += size
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EventRefused(row=0, reason="the request cannot be read") from error

    def read(column: InputColumn) -> tuple[str, list[Any]]:
        entry = entries[column.name]
        if column.name in binary:
            return entry.get("datatype"), _from_bytes(binary[column.name], column)
        return entry.get("datatype"), _from_json(entry.get("data"), column)

    def write(windows: Mapping[str, Sequence[Any]]) -> tuple[bytes, int]:
        for name in plan.dropped:
            del entries[name]
            binary.pop(name, None)
        made = _to_bytes(windows, plan)
        for name, content in made.items():
            dtype = DTYPE_OF_KIND[plan.made[name].kind]
            size = {"binary_data_size": len(content)}
            entries[name] = {"name": name, "datatype": dtype, "shape": [count, 1], "parameters": size}
        head["inputs"] = list(entries.values())
        try:
            text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise EventRefused(row=0, reason="the request holds text that is not Unicode") from error
        return b"".join([text, *binary.values(), *made.values()]), len(text)

    rows = _read_rows(plan, entries, read)
    count = len(rows[plan.time])
    return Request(rows=rows, write=write)


def read_grpc(body: bytes, plan: WindowPlan) -> Request:
    """The same for a message with the frame that gRPC puts before it."""
    try:
        message = service_pb2.ModelInferRequest.FromString(body[_FRAME.size :])
    except DecodeError as error:
        raise EventRefused(row=0, reason="the message cannot be read") from error
    entries = {entry.name: place for place, entry in enumerate(message.inputs)}
    raw = bool(message.raw_input_contents)
    if raw and len(message.raw_input_contents) != len(message.inputs):
        raise EventRefused(row=0, reason="the message has another number of raw contents than of inputs")

    def read(column: InputColumn) -> tuple[str, list[Any]]:
        entry = message.inputs[entries[column.name]]
        if raw:
            return entry.datatype, _from_bytes(message.raw_input_contents[entries[column.name]], column)
        values = list(getattr(entry.contents, _CONTENTS[column.kind]))
        return entry.datatype, [value.decode() for value in values] if column.kind == "string" else values

    def write(windows: Mapping[str, Sequence[Any]]) -> tuple[bytes, None]:
        for place in sorted((entries[name] for name in plan.dropped), reverse=True):
            del message.inputs[place]
            if raw:
                del message.raw_input_contents[place]
        for name, content in _to_bytes(windows, plan).items():
            kind = plan.made[name].kind
            entry = message.inputs.add(name=name, datatype=DTYPE_OF_KIND[kind], shape=[count, 1])
            if raw:
                message.raw_input_contents.append(content)
            else:
                values = memoryview(content).cast(CODES[kind]).tolist()
                getattr(entry.contents, _CONTENTS[kind]).extend(values)
        text: bytes = message.SerializeToString()
        return _FRAME.pack(0, len(text)) + text, None

    rows = _read_rows(plan, entries, read)
    count = len(rows[plan.time])
    return Request(rows=rows, write=write)


def _read_rows(
    plan: WindowPlan, present: Iterable[str], read: Callable[[InputColumn], tuple[str, list[Any]]]
) -> dict[str, list[Any]]:
    known = set(present)
    for name in plan.made:
        if name in known:
            raise EventRefused(
                row=0, reason=f"input {name!r} is computed from earlier events; do not send it"
            )
    rows: dict[str, list[Any]] = {}
    for column in plan.inputs:
        if column.name not in known:
            raise EventRefused(row=0, reason=f"input {column.name!r} is missing")
        try:
            dtype, values = read(column)
            if column.kind == "bool" and not _BOOLEANS.issuperset(values):
                raise ValueError("a value is not 0, 1 or -1, which is null")
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            raise EventRefused(row=0, reason=f"input {column.name!r} cannot be read: {error}") from error
        if dtype != column.dtype:
            raise EventRefused(
                row=0, reason=f"input {column.name!r} holds {dtype!r:.40}, the model asks for {column.dtype}"
            )
        rows[column.name] = with_nulls(values, column)
    count = len(rows[plan.time])
    if count > MOST_ROWS or any(len(values) != count for values in rows.values()):
        raise EventRefused(
            row=0, reason=f"a request has at most {MOST_ROWS:,} rows, the same number in each input"
        )
    return rows


def _from_bytes(data: bytes, column: InputColumn) -> list[Any]:
    if column.kind != "string":
        values: list[Any] = memoryview(data).cast(CODES[column.kind]).tolist()
        return values
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        if at + 4 + size > len(data):
            raise ValueError("a string is longer than its tensor")
        found.append(data[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return found


def _from_json(data: Any, column: InputColumn) -> list[Any]:
    """The values of a tensor in JSON, which may be nested by its shape."""
    while isinstance(data, list) and data and isinstance(data[0], list):
        data = [value for part in data for value in part]
    if not isinstance(data, list):
        raise TypeError("it has no data")
    if column.kind == "float":
        return [c_float(value).value for value in data]
    wanted = str if column.kind == "string" else int
    if not all(type(value) is wanted for value in data):
        raise ValueError(f"a value is not a {'string' if wanted is str else 'integer'}")
    if wanted is str:
        "".join(data).encode()  # ValueError for what is not Unicode
    else:
        struct.pack(f"{len(data)}{CODES[column.kind]}", *data)  # struct.error for one that does not fit
    return data


def _to_bytes(windows: Mapping[str, Sequence[Any]], plan: WindowPlan) -> dict[str, bytes]:
    found = {}
    for name, values in windows.items():
        kind = plan.made[name].kind
        null = null_of(kind)
        filled = (null if value is None else value for value in values)
        found[name] = struct.pack(f"<{len(values)}{CODES[kind]}", *filled)
    return found
