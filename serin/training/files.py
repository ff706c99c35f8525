"""Small files that must be whole or absent, and locks that the kernel frees."""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serin.errors import TrainingRefused

_POLL_S = 0.05


def write_whole(path: Path, data: str | bytes) -> None:
    """`path` holds either what it held before or all of `data`, also after a power cut."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")  # several machines may write the same
    with scratch.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` lasting."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def only_one(path: Path, *, wait_s: float) -> Iterator[None]:
    """Hold the lock file for the block; TrainingRefused when somebody else still holds it after `wait_s`."""
    deadline = time.monotonic() + wait_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    reason = "another process is training there; wait for it or use another folder"
                    raise TrainingRefused(folder=path.parent, reason=reason) from None
                time.sleep(_POLL_S)
        yield
