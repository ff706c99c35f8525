"""Calls the library that decodes recorded requests (decoder_library.py builds it)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.formats.schema import InputColumn, OutputTensor, Schema
from serin.formats.serving.recorded import NUMBERS, RecordedBlock, Strings, Values

_FAULTS = (
    "the request cannot be read",
    "the request has other inputs than the model's",
    "the answer cannot be read",
)


class Decoder:
    """The library as a function (`formats.serving.recorded.Decode`). Other threads run while it works."""

    def __init__(self, library: Path) -> None:
        found = ctypes.CDLL(str(library))
        self._decode, self._free = found.serin_decode, found.serin_decoded_free
        self._size, self._data = found.serin_decoded_size, found.serin_decoded_data
        words = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t
        self._decode.argtypes, self._decode.restype = words, ctypes.c_void_p
        for read, result in ((self._size, ctypes.c_size_t), (self._data, ctypes.c_void_p)):
            read.argtypes, read.restype = (ctypes.c_void_p, ctypes.c_size_t), result
        self._free.argtypes, self._free.restype = (ctypes.c_void_p,), None

    def __call__(self, schema: Schema, hidden: Collection[str], entries: npt.ArrayLike) -> RecordedBlock:
        """Raises MemoryError when there is not enough."""
        lines = _columns(schema, hidden)
        addresses = np.array(entries, np.uint64)
        decoded = self._decode(lines, len(lines), addresses.ctypes.data, len(addresses))
        if not decoded:
            raise MemoryError("recorded requests cannot be decoded")
        try:
            return _block(schema, hidden, self._buffers(decoded))
        finally:
            self._free(decoded)

    def _buffers(self, decoded: int) -> Iterator[bytes]:
        place = 0
        while True:
            size = self._size(decoded, place)
            yield ctypes.string_at(self._data(decoded, place), size) if size else b""
            place += 1


def _columns(schema: Schema, hidden: Collection[str]) -> bytes:
    """The columns as decode.cc reads them."""

    def line(what: str, each: InputColumn | OutputTensor, *, hides: bool = False) -> str:
        return f"{what} {each.dtype} {math.prod(each.dims)} {int(hides)} {each.name.encode().hex()}"

    inputs = [line("input", each, hides=each.name in hidden) for each in schema.inputs]
    return "\n".join([*inputs, *(line("output", each) for each in schema.outputs)]).encode()


def _block(schema: Schema, hidden: Collection[str], buffers: Iterator[bytes]) -> RecordedBlock:
    def numbers(dtype: str) -> Any:
        return np.frombuffer(next(buffers), dtype)

    def values(dtype: str) -> tuple[Values, Any]:
        lengths, data, given = numbers("<u4"), next(buffers), numbers("?")
        found = Strings(lengths, data) if dtype == "BYTES" else np.frombuffer(data, NUMBERS[dtype])
        return found, given

    t, us, code, epoch, rows = (numbers(dtype) for dtype in ("<f8", "<f8", "<i4", "<i8", "<u4"))
    ids, client_ids, arms = (Strings(numbers("<u4"), next(buffers)) for _ in range(3))
    inputs = [values(each.dtype)[0] for each in schema.inputs]
    outputs = [values(each.dtype) for each in schema.outputs]
    faults = numbers("<u8")[1:].tolist()
    return RecordedBlock(
        t=t,
        us=us,
        code=code,
        epoch=epoch,
        request_rows=rows,
        ids=ids,
        client_ids=client_ids,
        arms=arms,
        inputs=tuple(
            None if each.name in hidden else found for each, found in zip(schema.inputs, inputs, strict=True)
        ),
        outputs=tuple(found for found, _ in outputs),
        given=tuple(given for _, given in outputs),
        faults={reason: count for reason, count in zip(_FAULTS, faults, strict=True) if count},
    )
