"""How recorded requests are written to the spool, and which requests are recorded.

It imports nothing but Python's own modules, because a copy of this file is part of every release that Triton's Python
backend serves (triton_models/onnx_python). The C++ backend writes the same bytes (triton_models/onnx_native/spool.h).

A file is one line of JSON (`encode_header`) and blocks (`Rows.encode`). Files of one writer are numbered; the one that
is being written is called `NNNNNNNN.open` and is renamed to `NNNNNNNN.rows` when it is complete.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

FORMAT, VERSION = "serin.spool", 1
MAGIC = b"\x89SpoolB\n"
OPEN, COMPLETE = ".open", ".rows"  # how names of files end
DEFAULT_LIMIT_BYTES = 256 << 20  # of one release's spool folder
LONGEST_ID_BYTES = 128  # longer ids are cut

_MASK = 0xFFFFFFFF


class Recorded(NamedTuple):
    """One request. `values`: an array [rows, ...] for each input and then each output; strings as arrays of bytes."""

    t: float  # arrival at the backend, seconds since 1970
    id: bytes
    client_id: bytes
    rows: int
    values: Sequence[Any]


def is_drawn(request_id: str | bytes, share: float) -> bool:
    """Returns whether the request with this id is recorded: its lot, murmur3-32 with seed 0, is below share * 2^32.

    So equal ids have equal lots everywhere, and a larger share draws every id that a smaller one draws.
    """
    return share >= 1 or lot(request_id) < share * 2.0**32


def lot(request_id: str | bytes) -> int:
    """Returns murmur3-32 (seed 0) of the id's UTF-8 bytes. `serin.columns.hashing.hash_strings` does whole arrays."""
    data = request_id.encode() if isinstance(request_id, str) else bytes(request_id)
    state, words = 0, len(data) // 4
    for word in struct.unpack_from(f"<{words}I", data):
        word = (word * 0xCC9E2D51) & _MASK
        state ^= (((word << 15) | (word >> 17)) * 0x1B873593) & _MASK
        state = (((state << 13) | (state >> 19)) * 5 + 0xE6546B64) & _MASK
    word = (int.from_bytes(data[4 * words :], "little") * 0xCC9E2D51) & _MASK
    state ^= ((((word << 15) | (word >> 17)) * 0x1B873593) & _MASK) ^ len(data)
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def encode_header(
    *,
    model: str,
    release: str,
    share: float,
    inputs: Sequence[tuple[str, str, Sequence[int]]],
    outputs: Sequence[tuple[str, str, Sequence[int]]],
    null_texts: Mapping[str, Sequence[str]] | None = None,
) -> bytes:
    """Returns a file's first line. `inputs`: name, kind and dims of a row; `outputs`: name, dtype and dims.
    `null_texts`: the strings besides "" that are null, by input."""
    document = {"format": FORMAT, "version": VERSION, "model": model, "release": release, "share": share}
    tensors = {"inputs": [[name, kind, list(dims)] for name, kind, dims in inputs]}
    tensors["outputs"] = [[name, dtype, list(dims)] for name, dtype, dims in outputs]
    nulls = {"null_texts": {name: list(texts) for name, texts in (null_texts or {}).items()}}
    return json.dumps({**document, **tensors, **nulls}, separators=(",", ":")).encode() + b"\n"


class Rows:
    """Requests by column. `is_text`: of each input and then each output, whether it holds strings."""

    def __init__(self, is_text: Sequence[bool]) -> None:
        self.requests = self.rows = self.bytes = 0
        self._is_text = tuple(is_text)
        self._times, self._counts = array("d"), array("I")
        self._ids, self._client_ids = _Strings(), _Strings()
        self._columns = [_Strings() if text else bytearray() for text in self._is_text]

    def add(self, request: Recorded) -> None:
        self._times.append(request.t)
        self._counts.append(request.rows)
        size = 12 + self._ids.add([request.id[:LONGEST_ID_BYTES]])
        size += self._client_ids.add([request.client_id[:LONGEST_ID_BYTES]])
        for column, values in zip(self._columns, request.values, strict=True):
            if isinstance(column, _Strings):
                size += column.add(values.ravel().tolist())
            else:
                column += values.tobytes()
                size += values.nbytes
        self.requests += 1
        self.rows += request.rows
        self.bytes += size

    def encode(self, *, sent: int, dropped: int) -> list[Any]:
        """Returns a block in pieces. `sent`, `dropped`: how many requests this writer has drawn and lost since it
        started."""
        buffers: list[Any] = [_bytes_of(self._times), _bytes_of(self._counts)]
        for column in (self._ids, self._client_ids, *self._columns):
            buffers += column.buffers() if isinstance(column, _Strings) else [column]
        if not self.requests:
            buffers = []
        document = {"requests": self.requests, "rows": self.rows, "sent": sent, "dropped": dropped}
        sizes = [len(buffer) for buffer in buffers]
        header = json.dumps({**document, "sizes": sizes}, separators=(",", ":")).encode()
        return [MAGIC + len(header).to_bytes(4, "little") + header, *buffers]


def encode_block(requests: Sequence[Recorded], *, sent: int, dropped: int) -> bytes:
    """Returns a block of these requests, of which the first shows which columns are strings."""
    rows = Rows([values.dtype == object for values in requests[0].values] if requests else [])
    for request in requests:
        rows.add(request)
    return b"".join(rows.encode(sent=sent, dropped=dropped))


class _Strings:
    def __init__(self) -> None:
        self._lengths, self._data = array("I"), bytearray()

    def add(self, values: list[bytes]) -> int:
        joined = b"".join(values)
        self._lengths.extend(map(len, values))
        self._data += joined
        return len(joined) + 4 * len(values)

    def buffers(self) -> list[Any]:
        return [_bytes_of(self._lengths), self._data]


def _bytes_of(values: array[Any]) -> memoryview:
    return memoryview(values).cast("B")
