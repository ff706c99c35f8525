"""Rings in memory, in which each worker of the gateway leaves requests and answers for the recorder.

`<memory folder>/rings/<boot>-<worker>.ring`: a header of 4096 bytes and the data area. The gateway alone moves `head`
(bytes ever written), the recorder alone `tail` (bytes ever released); an entry is complete before `head` is moved. The
gateway holds a lock on the file as long as it lives. sources/request_filter/ring.h writes the same bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from serin.errors import RingBroken
from serin.machine.in_memory import RINGS, memory_folder
from serin.machine.locks import try_lock

MAGIC: Final = b"SerinRg1"
DATA: Final = 4096  # where the data area begins
SUFFIX: Final = ".ring"
FIXED: Final = struct.Struct("<IHHddiiqdIII7I")
"""What each entry begins with: size, kind, protocol, t, us, code, grpc, epoch, share, bytes of the request's and of the
answer's JSON (ALL: all), encoding of the answer, and the lengths of release, arm, id, client id, model, request and
answer, whose bytes follow."""
_BEGINNING: Final = np.dtype(
    {
        "names": ["size", "kind", "code", "grpc", "share", "encoding", "length"],
        "formats": ["<u4", "<u2", "<i4", "<i4", "<f8", "<u4", "<u4"],
        "offsets": [0, 4, 24, 28, 40, 56, 60],
        "itemsize": FIXED.size,
    }
)  # of FIXED, what the recorder looks at; `length`: of the release

ENTRY, FILLER = 1, 2
LOSSES: Final = 3  # the kind whose `code` and `grpc` count requests of a release that were dropped
HTTP, GRPC = 1, 2
PLAIN, GZIP, DEFLATE = 0, 1, 2
ALL: Final = 0xFFFFFFFF

_CAPACITY, _DRAWN, _FULL, _LARGE, _HEAD, _TAIL = 1, 2, 3, 4, 8, 16  # in words of eight bytes
_ENCODING, _LENGTHS = 11, 12  # in FIXED
_MOST_INFLATED: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries:
    """Entries of one release, oldest first: between the positions `start` and `end` (bytes ever written), `place` in
    the file. `lost`: how many requests an entry says were dropped."""

    release: str
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    share: npt.NDArray[np.float64]
    encoding: npt.NDArray[np.uint32]
    lost: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    def where(self, chosen: npt.NDArray[np.bool_]) -> Entries:
        arrays = {name: getattr(self, name)[chosen] for name in self.__slots__ if name != "release"}
        return Entries(release=self.release, **arrays)


class Ring:
    """A ring that is read. Raises RingBroken for a file that is not one, and FileNotFoundError."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.stem
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(self._file, 0)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise RingBroken(path=str(path), reason=str(error)) from error
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.address = ctypes.addressof(
            ctypes.c_char.from_buffer(self._map)
        )  # of the first byte in this process
        self._words = memoryview(self._map)[: min(len(self._map), DATA) // 8 * 8].cast("Q")
        self._sizes = memoryview(self._map)[: len(self._map) // 4 * 4].cast("I")
        good = len(self._map) > DATA and self._map[: len(MAGIC)] == MAGIC
        if not good or not 0 < self.capacity <= len(self._map) - DATA:
            self.close()
            raise RingBroken(path=str(path), reason="its first bytes are not a ring's")

    @property
    def capacity(self) -> int:
        return self._words[_CAPACITY]

    @property
    def drawn(self) -> int:
        """Requests that were drawn and answered well: entries, and those that were dropped."""
        return self._words[_DRAWN]

    @property
    def dropped(self) -> int:
        return self._words[_FULL] + self._words[_LARGE]

    @property
    def head(self) -> int:
        return self._words[_HEAD]

    @property
    def tail(self) -> int:
        return self._words[_TAIL]

    @property
    def fill(self) -> float:
        """The share of the ring that waits."""
        return (self.head - self.tail) / self.capacity

    def read(self, since: int, most_bytes: int = 1 << 62) -> tuple[list[Entries], int]:
        """The entries from the position `since` on, to the present end or until they have `most_bytes`, by release, and
        the position behind them. Raises RingBroken when the first one cannot be read."""
        head = self.head
        if not self.tail <= since <= head or head - self.tail > self.capacity:
            raise RingBroken(path=str(self.path), reason=f"{since} is not between its tail and its head")
        starts, behind = self._walk(since, head, most_bytes)
        found, good = self._columns(np.array(starts, np.int64))
        if good < len(starts):
            behind = starts[good]
        if behind < head and behind - since < most_bytes and not found:
            size = self._sizes[(DATA + behind % self.capacity) // 4]
            raise RingBroken(path=str(self.path), reason=f"an entry of {size} bytes at {behind}")
        return found, behind

    def _walk(self, since: int, head: int, most_bytes: int) -> tuple[list[int], int]:
        """Where entries begin, and the position behind the last one or before one that cannot be right."""
        starts, sizes, capacity, stop = list[int](), self._sizes, self.capacity, since + most_bytes
        while since < head and since < stop:
            place = since % capacity
            left = capacity - place
            if left < FIXED.size:  # too little for anything but a filler
                since += left
                continue
            size = sizes[(DATA + place) // 4]
            if size % 8 or not size or size > left or size > head - since:
                break
            starts.append(since)
            since += size
        return starts, since

    def _columns(self, starts: npt.NDArray[np.int64]) -> tuple[list[Entries], int]:
        """The entries that begin there, by release, and the number of those that come before one that is too short."""
        places = DATA + starts % self.capacity
        room = (len(self._map) - FIXED.size) // 8 + 1
        fixed = np.ndarray(room, _BEGINNING, self._map, strides=(8,))[
            places // 8
        ]  # they overlap, and one is taken
        short = (fixed["kind"] != FILLER) & (fixed["size"] < FIXED.size + fixed["length"].astype(np.int64))
        good = int(short.argmax()) if short.any() else len(starts)
        rest = np.flatnonzero(fixed["kind"][:good] != FILLER)
        found = []
        while len(rest):
            name = self._map[(at := int(places[rest[0]]) + FIXED.size) : at + int(fixed["length"][rest[0]])]
            same = fixed["length"][rest] == len(name)
            texts = (places[rest[same]] + FIXED.size)[:, None] + np.arange(len(name))
            same[same] = (np.frombuffer(self._map, np.uint8)[texts] == np.frombuffer(name, np.uint8)).all(
                axis=1
            )
            chosen, rest = rest[same], rest[~same]
            each = fixed[chosen]
            lost = each["code"].astype(np.int64) + each["grpc"]
            found.append(
                Entries(
                    release=name.decode(errors="replace"),
                    start=starts[chosen],
                    end=starts[chosen] + each["size"],
                    place=places[chosen],
                    share=each["share"],
                    encoding=each["encoding"],
                    lost=np.where(each["kind"] == LOSSES, lost, 0),
                )
            )
        return found, good

    def inflated(self, place: int) -> bytearray | None:
        """A copy of the entry there with its answer as it was before it was compressed. None: it cannot be known."""
        *fixed, answer = FIXED.unpack_from(self._map, place)
        texts = self._map[place + FIXED.size : place + fixed[0]]
        start = sum(fixed[_LENGTHS:])
        plain = inflate(texts[start : start + answer]) if fixed[_ENCODING] in (GZIP, DEFLATE) else None
        if plain is None:
            return None
        fixed[0], fixed[_ENCODING] = FIXED.size + start + len(plain), PLAIN
        return bytearray(FIXED.pack(*fixed, len(plain)) + texts[:start] + plain)

    def release(self, position: int) -> None:
        """Gives the bytes before `position` back to the writer."""
        self._words[_TAIL] = position

    def is_abandoned(self) -> bool:
        """Whether the writer has ended. No other one ever takes its ring."""
        return try_lock(self._file)

    def close(self) -> None:
        self._words.release()
        self._sizes.release()
        self._map.close()
        os.close(self._file)


def inflate(data: bytes) -> bytes | None:
    """What was compressed as gzip or deflate; None when it is damaged or larger than 64 MiB."""
    for window in (32 + zlib.MAX_WBITS, -zlib.MAX_WBITS):  # with gzip's or zlib's header, or with none
        stream = zlib.decompressobj(window)
        with suppress(zlib.error):
            found = stream.decompress(data, _MOST_INFLATED)
            return found if stream.eof else None
    return None


def rings_folder(home: Path) -> Path | None:
    """The folder of rings; None where no stack was started since it was last taken down."""
    memory = memory_folder(home)
    return memory / RINGS if memory else None


def ring_files(home: Path) -> list[Path]:
    """The rings of all gateways that ran in `home`, oldest first."""
    folder = rings_folder(home)
    return sorted(folder.glob(f"*{SUFFIX}")) if folder else []


def ring_heads(home: Path) -> dict[str, int]:
    """How far each ring is written now."""
    heads = {}
    for path in ring_files(home):
        with suppress(FileNotFoundError, RingBroken):
            ring = Ring(path)
            heads[ring.name] = ring.head
            ring.close()
    return heads


def are_recorded(home: Path, heads: Mapping[str, int]) -> bool:
    """Whether everything is in the records that was in the rings when `heads` were read."""
    for path in ring_files(home):
        with suppress(FileNotFoundError, RingBroken):
            ring = Ring(path)
            waits = ring.tail < heads.get(ring.name, 0)
            ring.close()
            if waits:
                return False
    return True


def remove_drained(home: Path) -> int:
    """Removes the rings that nobody writes and that hold nothing; returns the number of the others."""
    left = 0
    for path in ring_files(home):
        with suppress(FileNotFoundError, RingBroken):
            ring = Ring(path)
            if ring.head == ring.tail and ring.is_abandoned():
                path.unlink(missing_ok=True)
            else:
                left += 1
            ring.close()
    return left
