"""Content digests of local files. stat only decides whether a file has to be read again.

Each file has an entry in a folder, which is replaced atomically: any number of processes may use it, and a damaged or
lost one costs one more read. An entry is made only for a file that had not changed for a while when it was read: a file
that changes twice within a tick of its file system's clock looks the same after the second time.

Digests of long files are trees: the SHA-256 over the SHA-256 of every 64 KiB, many of which are computed at once. Of
each stream of bytes the tree has the digests of its pieces, then its size as 8 little-endian bytes.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from serin.machine.durable import replacing
from serin.machine.native.sha256_lanes import digests_of_pieces

PIECE_BYTES = 2**16
_BLOCK_BYTES = 2**23  # that a thread hashes at once
HASHED_BYTES = 2**30  # a larger file is known by its stat itself
_SETTLED_NS = 2 * 10**9  # the coarsest clock of a file system in use
Each = Callable[[Callable[[int], bytes], Iterable[int]], Iterable[bytes]]  # as `map`
_ENTRY = re.compile(r"([0-9 ]+)\n(sha256-tree:[0-9a-f]{64})\n")


def content_digest(path: Path, entries: Path) -> str:
    """The same as long as the file holds the same bytes. `entries`: the folder that remembers."""
    with path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        seen = _stat(status)
        if status.st_size > HASHED_BYTES:
            return f"stat:{seen}"
        entry = entries / hashlib.sha256(str(path.absolute()).encode()).hexdigest()
        if known := _remembered(entry, seen):
            return known
        began = time.time_ns()
        tree = TreeDigest()
        tree.add_file(stream.fileno())
        digest = f"sha256-tree:{tree.hexdigest()}"
        if _settled(status, began) and _stat(os.fstat(stream.fileno())) == seen:
            _remember(entry, f"{seen}\n{digest}\n")
    return digest


def settled_mark(path: Path) -> str | None:
    """A value that changes with every later change of the file; None when the file changed a moment ago, since another
    change might then look the same."""
    status = path.stat()
    return _stat(status) if _settled(status, time.time_ns()) else None


def _stat(status: os.stat_result) -> str:
    parts = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev
    return " ".join(map(str, parts))


def _settled(status: os.stat_result, now: int) -> bool:
    """A time of modification in the future was set by somebody; the time of the last change is the kernel's."""
    modified = status.st_mtime_ns if status.st_mtime_ns <= now else 0
    return max(modified, status.st_ctime_ns) + _SETTLED_NS <= now


def _remembered(entry: Path, seen: str) -> str | None:
    try:
        match = _ENTRY.fullmatch(entry.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    if match is None or match[1] != seen:
        return None
    with suppress(OSError):
        os.utime(entry)  # still of use
    return match[2]


def _remember(entry: Path, text: str) -> None:
    with suppress(OSError):  # read-only or full: the file is read again the next time
        entry.parent.mkdir(parents=True, exist_ok=True)
        with replacing(entry) as scratch:
            scratch.write_text(text, encoding="ascii")


class TreeDigest:
    """Over one or more streams of bytes, each ended by `end`."""

    def __init__(self) -> None:
        self._top = hashlib.sha256(b"serin.tree 1\n")
        self._size = 0

    def update(self, content: memoryview | bytes, *, expected_bytes: int | None = None) -> None:
        """Adds to the stream. All but its last part have whole pieces of 64 KiB."""
        assert self._size % PIECE_BYTES == 0, "something follows a piece that is not whole"
        self._size += len(content)
        self._top.update(digests_of_pieces(content, PIECE_BYTES, expected_bytes=expected_bytes))

    def end(self) -> None:
        self._top.update(self._size.to_bytes(8, "little"))
        self._size = 0

    def add_file(self, descriptor: int, *, expected_bytes: int | None = None, each: Each = map) -> None:
        """A whole file as one stream. `each`: `map`, or that of an executor, whose threads then share long files."""
        size = os.fstat(descriptor).st_size

        def digests_from(start: int) -> bytes:
            length = min(_BLOCK_BYTES, size - start)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            mapped = mmap.mmap(descriptor, length, flags=flags, prot=mmap.PROT_READ, offset=start)
            content = memoryview(
                mapped
            )  # unmapped with the last reference: a profiler may hold one for longer
            return digests_of_pieces(content, PIECE_BYTES, expected_bytes=max(size, expected_bytes or 0))

        starts = range(0, size, _BLOCK_BYTES)
        for digests in (each if len(starts) > 1 else map)(digests_from, starts):
            self._top.update(digests)
        self._size = size
        self.end()

    def hexdigest(self) -> str:
        return self._top.hexdigest()
