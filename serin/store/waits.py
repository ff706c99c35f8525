"""Waits: the time in which a stage or a run did not do its own work, named for people."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from serin.machine.typed_json import Document

NAMED = 3  # of the longest waits
_SHORTEST_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Document):
    """`what`: what took the time, such as "start of the process for train"."""

    what: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.what} {self.seconds:.1f} s"


_unclaimed: list[Wait] = []


@contextmanager
def waiting(waits: list[Wait], what: str) -> Iterator[None]:
    """Adds the time of the block, also of one that fails."""
    began = time.perf_counter()
    try:
        yield
    finally:
        waits.append(Wait(what=what, seconds=time.perf_counter() - began))


def waiting_in_process(what: str) -> AbstractContextManager[None]:
    """The same for code that knows no stage: the stage that works in this process takes it over (`claim`)."""
    return waiting(_unclaimed, what)


@contextmanager
def importing(what: str) -> Iterator[None]:
    """The same for imports. Garbage collections, which would take a tenth of their time, are left out."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with waiting_in_process(what):
            yield
    finally:
        if collects:
            gc.enable()


def claim() -> list[Wait]:
    """Returns the waits of this process that no stage has taken over yet."""
    found = list(_unclaimed)
    del _unclaimed[: len(found)]
    return found


def between(*moments: tuple[str, float | None]) -> list[Wait]:
    """The time until each moment since the one before, under the name of the later one.

    A moment that is None is left out. Moments of several hosts may be in the wrong order: their clocks differ.
    """
    known = [(what, moment) for what, moment in moments if moment is not None]
    return [
        Wait(what=what, seconds=max(0.0, moment - before))
        for (_, before), (what, moment) in itertools.pairwise(known)
    ]


def longest(waits: Iterable[Wait], count: int = NAMED) -> tuple[Wait, ...]:
    """The longest first. Waits with the same name count together; one that nobody would notice is not named."""
    sums: dict[str, float] = {}
    for wait in waits:
        sums[wait.what] = sums.get(wait.what, 0.0) + wait.seconds
    found = [Wait(what=what, seconds=seconds) for what, seconds in sums.items() if seconds >= _SHORTEST_S]
    return tuple(sorted(found, key=lambda wait: -wait.seconds)[:count])
