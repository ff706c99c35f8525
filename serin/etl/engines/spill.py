"""Values on disk instead of in memory: written once, mapped when used, so that only what is touched is in memory."""

from __future__ import annotations

import mmap
import pickle
import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ALIGN = 64
_HEADER = struct.Struct("<QQ")  # length of the content, number of buffers; then each buffer's length


@dataclass(frozen=True, slots=True)
class Spilled:
    """A value that is stored in a separate file."""

    path: str

    def load(self) -> Any:
        """The value; its arrays are mapped from the file, and private when written to."""
        content, buffers = map_buffers(Path(self.path))
        return pickle.loads(content, buffers=buffers)  # noqa: S301 (this build's own scratch file)

    def remove(self) -> None:
        Path(self.path).unlink(missing_ok=True)


def spill(value: Any, folder: str) -> Spilled:
    """Writes the value into a new file in `folder`; the arrays in it without a copy in memory."""
    found: list[pickle.PickleBuffer] = []
    content = pickle.dumps(value, protocol=5, buffer_callback=found.append)
    path = Path(folder) / f"{uuid.uuid4().hex}.piece"
    write_buffers(path, content, [buffer.raw() for buffer in found])
    return Spilled(str(path))


def loaded(value: Any) -> Any:
    return value.load() if isinstance(value, Spilled) else value


def write_buffers(path: Path, content: bytes, buffers: Sequence[Any]) -> None:
    """Writes a new file with `content` and the buffers, each where an array may begin."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    with path.open("xb") as file:
        file.write(_HEADER.pack(len(content), len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes))
        file.write(content)
        for buffer in buffers:
            file.write(bytes(-file.tell() % _ALIGN))
            file.write(buffer)
        file.write(bytes(_ALIGN))  # never an empty end: a mapping has no place for a buffer of length 0 there


def map_buffers(path: Path) -> tuple[memoryview, list[memoryview]]:
    """Returns the content of such a file and its buffers, mapped; private when written to."""
    with path.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    length, count = _HEADER.unpack_from(mapped)
    sizes = struct.unpack_from(f"<{count}Q", mapped, _HEADER.size)
    at = _HEADER.size + 8 * count
    content, at = mapped[at : at + length], at + length
    buffers = []
    for size in sizes:
        at += -at % _ALIGN
        buffers.append(mapped[at : at + size])
        at += size
    return content, buffers
