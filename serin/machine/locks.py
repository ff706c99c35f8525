"""Locks on files (flock), and who uses a file or a folder: a shared lock on its lock file.

The kernel frees a lock when its holder ends, for any reason, and shows it to every container and pid namespace that has
the volume; a pid is meaningless there. Things are removed only under the exclusive lock (`unused`). This is the only
module that calls flock.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_S = 0.05
_held: dict[Path, int] = {}  # until this process ends
_holding = threading.Lock()


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
            deadline = time.monotonic() + wait_s
            while not try_lock(file):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{path} is locked by another process")
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(file)


def _kind(shared: bool) -> int:
    return fcntl.LOCK_SH if shared else fcntl.LOCK_EX


@contextmanager
def holding(lock: Path) -> Iterator[None]:
    """Whatever `lock` stands for is in use during the block. Waits while it is being removed."""
    file = _hold(lock)
    try:
        yield
    finally:
        os.close(file)


def hold_until_exit(lock: Path) -> None:
    """The same until this process ends. Where no lock can be made (a store that is only read) nothing is held."""
    with _holding, suppress(OSError):
        if lock not in _held:
            _held[lock] = _hold(lock)


@contextmanager
def unused(lock: Path) -> Iterator[bool]:
    """Whether nobody uses it; during the block nobody begins to. False also where that cannot be found out. Who
    removes the thing removes its lock file, too, before the block ends."""
    try:
        file, made = _open_or_make(lock)
    except OSError:
        yield False
        return
    try:
        try:
            free = try_lock(file) and _is(file, lock)
        except OSError:  # a file system without locks
            free = False
        yield free
        if free and made:
            lock.unlink(missing_ok=True)
    finally:
        os.close(file)


def _open_or_make(lock: Path) -> tuple[int, bool]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CLOEXEC
    while True:
        with suppress(FileExistsError):
            return os.open(lock, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        with suppress(FileNotFoundError):
            return os.open(lock, flags), False


def _hold(lock: Path) -> int:
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            wait_for_lock(file, shared=True)
            if _is(file, lock):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the lock file was removed with the thing that it protects: this one has no name


def _is(file: int, path: Path) -> bool:
    """Is the open file the one at `path`?"""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
