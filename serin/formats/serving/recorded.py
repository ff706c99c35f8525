"""Recorded requests of one release by column, between the decoder and the records."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.formats.schema import Schema

NUMBERS: Mapping[str, str] = {
    "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BOOL": "?",
    "INT8": "i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Strings:
    """Strings in two buffers: their lengths in bytes, and all bytes, one string after the other."""

    lengths: npt.NDArray[np.uint32]
    data: bytes

    def __len__(self) -> int:
        return len(self.lengths)

    def to_arrow(self) -> pa.StringArray:
        """Returns them as strings; bytes that are not UTF-8 become replacement characters."""
        offsets = np.zeros(len(self) + 1, np.int32)
        np.cumsum(self.lengths, out=offsets[1:])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self.data)]
        found = pa.StringArray.from_buffers(len(self), buffers[1], buffers[2])
        try:
            found.validate(full=True)
        except pa.ArrowInvalid:
            plain = pa.Array.from_buffers(pa.binary(), len(self), buffers).to_pylist()
            return pa.array([each.decode(errors="replace") for each in plain], pa.string())
        return found


Values = npt.NDArray[Any] | Strings


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedBlock:
    """Requests, oldest first. `inputs` and `outputs` are in the schema's order, all values of a column one after the
    other; None for an input that is hidden. `given`: of each output, which requests have it. `faults`: how many entries
    could not be decoded, by the reason."""

    t: npt.NDArray[np.float64]
    us: npt.NDArray[np.float64]  # NaN: not known
    code: npt.NDArray[np.int32]
    epoch: npt.NDArray[np.int64]  # -1: not known
    request_rows: npt.NDArray[np.uint32]
    ids: Strings
    client_ids: Strings
    arms: Strings
    inputs: tuple[Values | None, ...]
    outputs: tuple[Values, ...]
    given: tuple[npt.NDArray[np.bool_], ...]
    faults: Mapping[str, int]

    @property
    def requests(self) -> int:
        return len(self.t)

    @property
    def rows(self) -> int:
        return int(self.request_rows.sum(dtype=np.int64))


class Decode(Protocol):
    """Decodes entries of rings, which are at these addresses. `hidden`: inputs whose values are not to be read."""

    def __call__(self, schema: Schema, hidden: Collection[str], entries: npt.ArrayLike) -> RecordedBlock: ...
