"""Something that the watcher does again and again: recording, drift, objectives."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeVar

import pyarrow as pa

from serin.errors import SerinError, StoreUnreachable

T = TypeVar("T")


class Duty(ABC):
    """The base of all duties: a name, the seconds between two ticks, and what a tick does."""

    name = ""
    every_s = 1.0

    @abstractmethod
    def tick(self, now: float) -> None:
        """Does what is due at `now` (seconds since 1970). Its state survives a kill at any time."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Ends what the duty has started. Most start nothing: the next watcher continues."""


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
