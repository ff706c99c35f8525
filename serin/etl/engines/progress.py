"""Says how far a pass over the pieces has come, when it takes long enough for somebody to wonder."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 2.0


class Progress:
    """Called by an engine after each piece: at most one line every few seconds, and none for what is quick."""

    def __init__(self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._last = clock()
        self._doing = ""

    def begin(self, doing: str) -> None:
        self._doing = doing
        self._last = self._clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if done < total and now - self._last >= EVERY_S:
            self._last = now
            self._say(f"{self._doing}: {done} of {total} pieces")


def untold(done: int, total: int) -> None:
    """What an engine tells when nobody asked."""
