"""Locks on files (flock). The kernel frees them when their holder ends, for any reason.

This is the only module that calls flock; it does not know what a lock protects.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.05


def try_lock(file: int, *, shared: bool = False) -> bool:
    """Lock an open file without waiting. False when another process holds a lock that excludes this one."""
    try:
        fcntl.flock(file, _kind(shared) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: int, *, shared: bool = False) -> None:
    """Lock an open file, after any other holder."""
    fcntl.flock(file, _kind(shared))


@contextmanager
def locked(path: Path, *, wait_s: float | None = None, mode: int = 0o644) -> Iterator[None]:
    """Hold the exclusive lock on `path` during the block; the file is created with `mode` where it is missing.

    Waits for other holders: forever, or for `wait_s` seconds and then raises TimeoutError.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        if wait_s is None:
            wait_for_lock(file)
        else:
            _wait_until(file, path, time.monotonic() + wait_s)
        yield
    finally:
        os.close(file)


def _wait_until(file: int, path: Path, deadline: float) -> None:
    while not try_lock(file):
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{path} is locked by another process")
        time.sleep(_POLL_S)


def _kind(shared: bool) -> int:
    return fcntl.LOCK_SH if shared else fcntl.LOCK_EX
