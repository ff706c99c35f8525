"""Content digests of local files, by BLAKE3. stat only decides whether a file has to be read again.

Each file has an entry in a folder, which is replaced atomically: any number of processes may use it, and a damaged or
lost one costs one more read. An entry is made only for a file that had not changed for a while when it was read: a file
that changes twice within a tick of its file system's clock looks the same after the second time.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path

from blake3 import blake3

from serin.machine.durable import replacing

_BLOCK_BYTES = 2**21  # read at once: fewer would make many threads wait for the interpreter's lock
HASHED_BYTES = 2**30  # a larger file is known by its stat itself
_SETTLED_NS = 2 * 10**9  # the coarsest clock of a file system in use
_ENTRY = re.compile(r"([0-9 ]+)\n(blake3:[0-9a-f]{64})\n")


def content_digest(path: Path, entries: Path) -> str:
    """The same as long as the file holds the same bytes. `entries`: the folder that remembers."""
    with path.open("rb", buffering=0) as stream:
        status = os.fstat(stream.fileno())
        seen = _stat(status)
        if status.st_size > HASHED_BYTES:
            return f"stat:{seen}"
        entry = entries / hashlib.sha256(str(path.absolute()).encode()).hexdigest()
        if known := _remembered(entry, seen):
            return known
        began = time.time_ns()
        digest = f"blake3:{digest_of(stream).hex()}"
        if _settled(status, began) and _stat(os.fstat(stream.fileno())) == seen:
            _remember(entry, f"{seen}\n{digest}\n")
    return digest


def digest_of(stream: FileIO) -> bytes:
    """The BLAKE3 digest of what the stream still holds."""
    found, block = blake3(), memoryview(bytearray(_BLOCK_BYTES))
    while count := stream.readinto(block):
        found.update(block[:count])
    return found.digest()


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
