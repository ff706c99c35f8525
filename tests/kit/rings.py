"""Writes rings as the gateway does, and requests in the three forms that it takes."""

import fcntl
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serin.formats.serving.ring import ALL, DATA, ENTRY, FILLER, FIXED, HTTP, LOSSES, MAGIC, PLAIN, SUFFIX
from serin.machine.in_memory import RINGS

BOOT = "019ca0c5e400-17-0000abcd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request and its answer, as the gateway leaves them."""

    request: bytes
    answer: bytes
    t: float
    release: str = "taxis-v1"
    id: str = "id-1"
    client_id: str = ""
    arm: str = "stable"
    epoch: int = 4
    code: int = 200
    grpc: int = -1
    us: float = 2500.0
    share: float = 1.0
    protocol: int = HTTP
    request_json: int = ALL
    answer_json: int = ALL
    encoding: int = PLAIN

    def encode(self) -> bytes:
        model = self.release.partition("-v")[0]
        texts = [each.encode() for each in (self.release, self.arm, self.id, self.client_id, model)]
        parts = [*texts, self.request, self.answer]
        numbers = self.t, self.us, self.code, self.grpc, self.epoch, self.share
        forms = self.request_json, self.answer_json, self.encoding
        return entry_bytes(ENTRY, self.protocol, numbers, forms, parts)


def entry_bytes(
    kind: int, protocol: int, numbers: Sequence[Any], forms: Sequence[int], parts: Sequence[bytes]
) -> bytes:
    size = -(-(FIXED.size + sum(map(len, parts))) // 8) * 8
    fixed = FIXED.pack(size, kind, protocol, *numbers, *forms, *map(len, parts))
    return (fixed + b"".join(parts)).ljust(size, b"\0")


class RingWriter:
    """A worker of a gateway. `lives`: it holds its lock until `end`."""

    def __init__(
        self, home: Path, name: str = f"{BOOT}-0", *, capacity: int = 1 << 20, lives: bool = True
    ) -> None:
        folder = memory_of(home) / RINGS
        folder.mkdir(mode=0o700, exist_ok=True)
        self.path = folder / f"{name}{SUFFIX}"
        self.capacity = capacity
        self.drawn = self.full = self.large = self.head = 0
        self._dropped: dict[str, int] = {}
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(self._file, 0, DATA + capacity)
        os.pwrite(self._file, MAGIC + struct.pack("<Q", capacity), 0)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        if not lives:
            self.end()

    def write(self, exchange: Exchange) -> bool:
        """Leaves an entry. False: there was no room, and it is counted."""
        self.drawn += 1
        good = self._leave_losses() and self._leave(exchange.encode())
        if not good:
            self.drop(exchange.release)
        self._count()
        return good

    def drop(self, release: str, count: int = 1) -> None:
        """Counts requests that were drawn before as dropped."""
        self.full += count
        self._dropped[release] = self._dropped.get(release, 0) + count
        self._count()

    def damage(self, position: int, data: bytes) -> None:
        os.pwrite(self._file, data, DATA + position % self.capacity)

    def end(self) -> None:
        os.close(self._file)

    @property
    def tail(self) -> int:
        return int(struct.unpack("<Q", os.pread(self._file, 8, 128))[0])

    def _leave_losses(self) -> bool:
        for release, count in list(self._dropped.items()):
            model = release.partition("-v")[0].encode()
            parts = [release.encode(), b"", b"", b"", model, b"", b""]
            data = entry_bytes(LOSSES, HTTP, (0.0, 0.0, count, 0, -1, 1.0), (ALL, ALL, PLAIN), parts)
            if not self._leave(data):
                return False
            del self._dropped[release]
        return True

    def _leave(self, data: bytes) -> bool:
        place = self.head % self.capacity
        rest = self.capacity - place
        filler = rest if rest < len(data) else 0
        if self.head + filler + len(data) - self.tail > self.capacity:
            return False
        if filler:
            self.damage(self.head, struct.pack("<IHH", filler, FILLER, 0))
            self.head += filler
        self.damage(self.head, data)
        self._count()
        self.head += len(data)
        os.pwrite(self._file, struct.pack("<Q", self.head), 64)
        return True

    def _count(self) -> None:
        os.pwrite(self._file, struct.pack("<QQQ", self.drawn, self.full, self.large), 16)


def memory_of(home: Path) -> Path:
    """The folder of a stack in memory; for tests beside the home."""
    link, folder = home / "stack" / "sockets", home / "memory"
    if not link.is_symlink():
        link.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        link.symlink_to(folder)
    return link.readlink()


def json_request(columns: Mapping[str, tuple[str, Sequence[int], Any]], **more: Any) -> bytes:
    """`columns`: datatype, shape and data of each."""
    return json.dumps({**more, "inputs": _tensors(columns)}).encode()


def json_answer(columns: Mapping[str, tuple[str, Sequence[int], Any]], **more: Any) -> bytes:
    return json.dumps({"model_name": "taxis", **more, "outputs": _tensors(columns)}).encode()


def _tensors(columns: Mapping[str, tuple[str, Sequence[int], Any]]) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": dtype, "shape": list(shape), "data": data}
        for name, (dtype, shape, data) in columns.items()
    ]


def binary_body(which: str, columns: Mapping[str, tuple[str, Sequence[int], Any]]) -> tuple[bytes, int]:
    """JSON and the tensors behind it, and the bytes of the JSON."""
    entries, behind = [], b""
    for name, (dtype, shape, data) in columns.items():
        raw = wire(dtype, data)
        parameters = {"binary_data_size": len(raw)}
        entries.append({"name": name, "datatype": dtype, "shape": list(shape), "parameters": parameters})
        behind += raw
    head = json.dumps({which: entries}).encode()
    return head + behind, len(head)


def wire(dtype: str, values: Sequence[Any]) -> bytes:
    """Values as they travel in binary."""
    if dtype == "BYTES":
        return b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in values)
    kind = {"FP32": np.float32, "INT64": np.int64, "INT8": np.int8}[dtype]
    with np.errstate(over="ignore"):
        return np.array([float(each) if dtype == "FP32" else each for each in values], kind).tobytes()
