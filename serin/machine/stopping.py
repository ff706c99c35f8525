"""Ends work that runs in a thread: it is asked to stop from outside and looks for that where it can end safely."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from serin.errors import StageStopped

_asked: ContextVar[tuple[threading.Event, str] | None] = ContextVar("serin_stopping", default=None)


@contextmanager
def stoppable(stop: threading.Event, stage: str) -> Iterator[None]:
    """Within the block, `check_stopped` raises once `stop` is set."""
    token = _asked.set((stop, stage))
    try:
        yield
    finally:
        _asked.reset(token)


def check_stopped() -> None:
    """StageStopped when this work was asked to stop: a cancelled run must not publish what nobody waits for."""
    asked = _asked.get()
    if asked is not None and asked[0].is_set():
        raise StageStopped(stage=asked[1])
