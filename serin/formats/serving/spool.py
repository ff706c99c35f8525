"""Reads the spool, where serving backends leave the requests they record for the recorder.

`<home>/spool/<release>/<writer>/NNNNNNNN.rows`: files of one writer, oldest first. Nothing here loops over rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.errors import SpoolBroken
from serin.formats.serving.spool_blocks import FORMAT, MAGIC, VERSION
from serin.machine.typed_json import Document, Row

DTYPES: Mapping[str, str | None] = {
    "string": None, "float": "<f4", "int": "<i8", "timestamp": "<i8", "bool": "i1",  # kinds of inputs
    "BYTES": None, "FP32": "<f4", "FP64": "<f8", "INT64": "<i8", "INT32": "<i4", "INT8": "i1", "UINT8": "u1",
    "BOOL": "?",
}  # fmt: skip
_MOST_HEADER_BYTES = 64 << 20
_ID_BUFFERS = 6  # times, rows, and lengths and bytes of the two ids


@dataclass(frozen=True, slots=True, eq=False)
class Strings:
    """Strings in two buffers: their lengths in bytes, and all bytes, one string after the other."""

    lengths: npt.NDArray[np.uint32]
    data: memoryview

    def __len__(self) -> int:
        return len(self.lengths)

    def to_arrow(self) -> pa.LargeBinaryArray:
        """Returns them as binary values: inputs are UTF-8, ids are whatever was sent."""
        offsets = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return pa.Array.from_buffers(
            pa.large_binary(), len(self), [None, pa.py_buffer(offsets), pa.py_buffer(self.data)]
        )

    def to_list(self) -> list[str]:
        return [bytes(value).decode(errors="replace") for value in self.to_arrow().to_pylist()]


Values = npt.NDArray[Any] | Strings


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor(Row):
    """An input (`kind`: string, float, int, timestamp, bool) or an output (`kind`: its dtype, such as FP32)."""

    name: str
    kind: str
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.kind not in DTYPES:
            raise ValueError(f"{self.name!r} is of unknown kind {self.kind!r}")

    @property
    def width(self) -> int:
        """The number of values in a row."""
        return math.prod(self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolHeader(Document, form=FORMAT, version=VERSION):
    model: str
    release: str
    share: float
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    null_texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpoolBlock:
    """Requests, oldest first, by column. `inputs` and `outputs` are in the header's order; an array is [rows, *dims],
    strings are flat. `sent`, `dropped`: requests that the writer has drawn and lost since it started."""

    requests: int
    rows: int
    sent: int
    dropped: int
    t: npt.NDArray[np.float64]
    request_rows: npt.NDArray[np.uint32]
    ids: Strings
    client_ids: Strings
    inputs: tuple[Values, ...]
    outputs: tuple[Values, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpoolFile:
    """`torn_bytes`: how many bytes at the end are not a whole block; 0 unless the writer was killed."""

    header: SpoolHeader
    blocks: tuple[SpoolBlock, ...]
    torn_bytes: int


def spool_root(home: Path) -> Path:
    return home / "spool"


def spool_folder(home: Path, release: str) -> Path:
    """Returns the release's folder, with a folder for each process that writes."""
    return spool_root(home) / release


def read_spool(path: Path) -> SpoolFile:
    """Reads a file, complete or not. Raises SpoolBroken when its first line cannot be read; FileNotFoundError."""
    data = memoryview(path.read_bytes())
    end = bytes(data[:_MOST_HEADER_BYTES]).find(b"\n")
    try:
        header = SpoolHeader.load(bytes(data[: max(end, 0)]))
    except ValueError as error:
        raise SpoolBroken(path=str(path), reason=f"{type(error).__name__}: {error}") from error
    blocks, place = [], end + 1
    while place < len(data):
        found = _block(data, place, header)
        if found is None:
            break
        block, place = found
        blocks.append(block)
    return SpoolFile(header=header, blocks=tuple(blocks), torn_bytes=len(data) - place)


def _block(data: memoryview, place: int, header: SpoolHeader) -> tuple[SpoolBlock, int] | None:
    """Returns the block at `place` and the place behind it; None when it is not whole."""
    start = place + len(MAGIC) + 4
    if start > len(data) or data[place : place + len(MAGIC)] != MAGIC:
        return None
    length = int.from_bytes(data[start - 4 : start], "little")
    try:
        document = json.loads(bytes(data[start : start + length]))
        counts = {name: int(document[name]) for name in ("requests", "rows", "sent", "dropped")}
        sizes = [int(size) for size in document["sizes"]]
    except (ValueError, KeyError, TypeError):
        return None
    if not counts["requests"]:
        sizes = [0] * (_ID_BUFFERS + sum(_buffers(each) for each in (*header.inputs, *header.outputs)))
    place = start + length
    if min(sizes, default=-1) < 0 or place + sum(sizes) > len(data):
        return None
    ends = place + np.cumsum(sizes)
    pieces = [data[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]
    try:
        return _columns(pieces, counts, header), place + sum(sizes)
    except (ValueError, IndexError):
        return None


def _columns(pieces: list[memoryview], counts: dict[str, int], header: SpoolHeader) -> SpoolBlock:
    """Raises ValueError when a buffer is not as long as the counts say."""
    requests, rows = counts["requests"], counts["rows"]
    if sum(_buffers(each) for each in (*header.inputs, *header.outputs)) + _ID_BUFFERS != len(pieces):
        raise ValueError("other buffers than the header names")
    t = np.frombuffer(pieces[0], "<f8")
    request_rows = np.frombuffer(pieces[1], "<u4")
    if len(t) != requests or len(request_rows) != requests or request_rows.sum(dtype=np.int64) != rows:
        raise ValueError("other requests than the block says")
    values: list[Values] = []
    at = _ID_BUFFERS
    for tensor in (*header.inputs, *header.outputs):
        dtype = DTYPES[tensor.kind]
        if dtype is None:
            values.append(_strings(pieces[at], pieces[at + 1], rows * tensor.width))
        else:
            values.append(np.frombuffer(pieces[at], dtype).reshape(rows, *tensor.dims))
        at += _buffers(tensor)
    return SpoolBlock(
        **counts,
        t=t,
        request_rows=request_rows,
        ids=_strings(pieces[2], pieces[3], requests),
        client_ids=_strings(pieces[4], pieces[5], requests),
        inputs=tuple(values[: len(header.inputs)]),
        outputs=tuple(values[len(header.inputs) :]),
    )


def _buffers(tensor: Tensor) -> int:
    return 2 if DTYPES[tensor.kind] is None else 1


def _strings(lengths: memoryview, data: memoryview, count: int) -> Strings:
    found = np.frombuffer(lengths, "<u4")
    if len(found) != count or found.sum(dtype=np.int64) != len(data):
        raise ValueError("other strings than their lengths say")
    return Strings(found, data)
