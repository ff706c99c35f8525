"""Logs how far a pass over the pieces has come, when it takes a while. Also the place where an ETL can be stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from serin.machine.stopping import check_stopped

logger = logging.getLogger(__name__)

EVERY_S = 2.0


class Progress:
    """Called by an engine after each piece: at most one line every few seconds, and none for what is quick."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._doing = ""

    def begin(self, doing: str) -> None:
        check_stopped()
        self._doing = doing
        self._last = self._clock()

    def __call__(self, done: int, total: int) -> None:
        check_stopped()
        now = self._clock()
        if done < total and now - self._last >= EVERY_S:
            self._last = now
            logger.info(f"{self._doing}: {done} of {total} pieces")
