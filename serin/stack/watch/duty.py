"""Runs the watcher's duties, each at its own interval. One that fails does not keep the others from running."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from serin.errors import StoreUnreachable
from serin.machine.heartbeat import beat

log = logging.getLogger(__name__)

_REPEAT_S = 60.0  # the same error is logged once in this time
_AWAY_S = (
    60.0  # a duty that has waited for the store in vain waits again after so long: the recorder waits with it
)


class Duty(Protocol):
    """Something that the watcher does again and again: recording, drift, objectives."""

    @property
    def name(self) -> str: ...

    @property
    def every_s(self) -> float: ...

    def tick(self, now: float) -> None:
        """Does what is due at `now` (seconds since 1970). Its state survives a kill at any time."""
        ...

    def close(self) -> None: ...


class Rounds:
    """Calls each duty when it is due."""

    def __init__(self, duties: Sequence[Duty], clock: Callable[[], float] = time.monotonic) -> None:
        self._duties, self._clock = tuple(duties), clock
        self._due = dict.fromkeys(range(len(self._duties)), 0.0)
        self._logged: dict[tuple[str, str], float] = {}
        self.failing: dict[str, str] = {}
        """By duty: why its last tick failed."""

    def run(self, now: float) -> float:
        """Runs every duty that is due and returns the seconds until the next one is."""
        for place, duty in enumerate(self._duties):
            began = self._clock()
            if began < self._due[place]:
                continue
            self._due[place] = began + duty.every_s
            beat()
            try:
                duty.tick(now)
                self.failing.pop(f"the watcher's {duty.name}", None)
            except Exception as error:  # noqa: BLE001 (one duty's bug must not stop the recorder)
                self._report(duty.name, error)
                self.failing[f"the watcher's {duty.name}"] = str(error)
                if isinstance(error, StoreUnreachable):
                    self._due[place] = self._clock() + max(_AWAY_S, duty.every_s)
        return max(0.0, min(self._due.values(), default=self._clock() + 1.0) - self._clock())

    def close(self) -> None:
        for duty in self._duties:
            try:
                duty.close()
            except Exception as error:  # noqa: BLE001
                self._report(duty.name, error)

    def _report(self, name: str, error: Exception) -> None:
        key = name, f"{type(error).__name__}: {error}"
        if self._clock() - self._logged.get(key, -_REPEAT_S) >= _REPEAT_S:
            self._logged[key] = self._clock()
            log.warning("%s failed and will be tried again: %s", name, key[1], exc_info=error)
