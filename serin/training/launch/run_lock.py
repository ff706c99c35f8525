"""Allows only one process to train in a folder at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from serin.errors import TrainingRefused
from serin.machine.locks import locked


@contextmanager
def only_one(path: Path, *, wait_s: float) -> Iterator[None]:
    """Holds the lock file for the block; raises TrainingRefused when another process still holds it after `wait_s`."""
    with ExitStack() as held:
        try:
            held.enter_context(locked(path, wait_s=wait_s))
        except TimeoutError:
            reason = "another process is training there; wait for it or use another folder"
            raise TrainingRefused(folder=path.parent, reason=reason) from None
        yield
