"""Locks that the kernel frees."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serin.errors import TrainingRefused

_POLL_S = 0.05


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
