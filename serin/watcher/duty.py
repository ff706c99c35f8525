"""Something that the watcher does again and again: recording, drift, objectives."""

from __future__ import annotations

import logging
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import pyarrow as pa

from serin.errors import LeadershipLost, SerinError, StoreUnreachable
from serin.machine.heartbeat import beat

log = logging.getLogger(__name__)

T = TypeVar("T")
Commit = Callable[[], None]
"""Has the store keep what was decided, and raises LeadershipLost unless this process leads: called before anything
leaves it. On one machine there is nothing to do."""

_REPEAT_S = 60.0  # the same error is logged once in this time


class Duty(ABC):
    """The base of all duties: a name, the seconds between two ticks, and what a tick does."""

    name = ""
    every_s = 1.0

    @abstractmethod
    def tick(self, now: float) -> None:
        """Does what is due at `now` (seconds since 1970). Its state survives a kill at any time."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Ends what the duty has started. Most start nothing: the next watcher continues."""


def nothing() -> None:
    pass


def look_at_each(models: Iterable[T], look: Callable[[T], None], forget: Callable[[T], object]) -> None:
    """Looks at each model. One that fails is forgotten and does not keep the others waiting; its error is raised
    then."""
    failed: Exception | None = None
    for model in models:
        try:
            look(model)
        except (SerinError, OSError, ValueError, pa.ArrowException, sqlite3.Error) as error:
            forget(model)
            failed = error
            if isinstance(error, StoreUnreachable):
                break  # the others would wait for it as well
    if failed is not None:
        raise failed


class Rounds:
    """Calls each duty when it is due. `away_s`: until a duty waits for the store again after having waited in vain: the
    others wait with it."""

    def __init__(
        self, duties: Sequence[Duty], clock: Callable[[], float] = time.monotonic, *, away_s: float = 60.0
    ) -> None:
        self._duties, self._clock, self._away_s = tuple(duties), clock, away_s
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
            except LeadershipLost:
                raise
            except Exception as error:  # noqa: BLE001 (one duty's bug must not stop the recorder)
                self._report(duty.name, error)
                self.failing[f"the watcher's {duty.name}"] = str(error)
                if isinstance(error, StoreUnreachable):
                    self._due[place] = self._clock() + max(self._away_s, duty.every_s)
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
