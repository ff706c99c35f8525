"""Proof that a long-running process works: its main loop writes beats into eight bytes of shared memory.

A beat is a time on the system's monotonic clock until which silence means nothing. A process that has not called
`begin`, and any thread but the one that did, writes none: code that waits for somebody else may say how long at most
without knowing who runs it.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from pathlib import Path

_TIME = struct.Struct("d")


class _Here:
    """What this process writes beats to, and the process and thread that may."""

    memory: mmap.mmap | None = None
    writer = 0, 0
    waits_s = 0.0


def begin(file: Path, *, waits_s: float = 0.0) -> None:
    """Lets this thread of this process write beats to `file`, and writes the first one. `waits_s`: how long any step
    of its loop may wait for something else."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # a write to shared memory on a full disk would be fatal
        os.posix_fallocate(descriptor, 0, _TIME.size)
        _Here.memory, _Here.waits_s = mmap.mmap(descriptor, _TIME.size), waits_s
    finally:
        os.close(descriptor)
    _Here.writer = os.getpid(), threading.get_ident()
    beat()


def beat(within_s: float = 0.0) -> None:
    """Records that the main loop works. `within_s`: how long the next step may wait, if that is longer."""
    if _Here.memory is not None and _Here.writer == (os.getpid(), threading.get_ident()):
        _TIME.pack_into(_Here.memory, 0, time.monotonic() + max(within_s, _Here.waits_s))


def read_beat(file: Path) -> float | None:
    """Returns the last beat; None when there was none."""
    try:
        return float(_TIME.unpack(file.read_bytes())[0])
    except (OSError, struct.error):
        return None
