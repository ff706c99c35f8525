"""The duty that counts the gateway's requests into the history."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from serin.host.wiring import request_log
from serin.monitoring.history.store import History
from serin.watcher.duty import Duty
from serin.watcher.promises import Promises

_BUSY_S: Final = 1.0  # of a tick, at most: other duties wait for it
_TIDY_S: Final = 60.0


class HistoryDuty(Duty):
    """A long log, as after a pause, is read over several ticks."""

    name, every_s = "history", 2.0

    def __init__(self, home: Path, promises: Promises) -> None:
        self._home, self._promises = home, promises
        self._history: History | None = None
        self._tidied = -_TIDY_S

    def tick(self, now: float) -> None:
        history = self._history = self._history or History(self._home)
        end = time.monotonic() + _BUSY_S
        more = True
        while more and time.monotonic() < end:
            _, more = history.read_log(request_log(self._home), self._promises.limit_ms)
        if time.monotonic() - self._tidied >= _TIDY_S:
            self._tidied = time.monotonic()
            history.tidy(now)

    def close(self) -> None:
        if self._history is not None:
            self._history.close()
