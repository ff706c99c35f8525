"""Writes what the hosts are to run and route. Each change is the next numbered object; a lost race ends the term."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from serin.errors import LeadershipLost, ObjectExists, StoreUnreachable
from serin.formats.cluster.desired_state import PREFIX, DesiredState
from serin.rollout.cluster.leadership import Leadership
from serin.store.numbered import NumberedWriter, numbered_key, numbers
from serin.store.objects import Objects

logger = logging.getLogger(__name__)

_KEEP: Final = 200
_YOUNG_S: Final = 3600.0


def newest_state(objects: Objects, *, after: int = 0) -> DesiredState | None:
    """Returns the newest desired state above a number; None: there is none. Raises StoreUnreachable."""
    while found := numbers(objects, PREFIX, after=after):
        stored = objects.read(numbered_key(PREFIX, found[-1]))
        if stored is not None:
            return DesiredState.load(stored.content)
    return None


class DesiredStates:
    """The newest desired state, which this process alone changes in its term."""

    def __init__(self, objects: Objects, leadership: Leadership, term: int, now: Callable[[], float]) -> None:
        self._objects, self._leadership, self._term, self._now = objects, leadership, term, now
        found = newest_state(objects)
        self.state = found or DesiredState(seq=0, term=0, by="", t=0.0)
        self._writer = NumberedWriter(objects, PREFIX, self.state.seq)

    def affirm(self) -> None:
        """Writes the state again with this term: a controller that led before cannot write its next one any more."""
        self._write(self.state)
        with contextlib.suppress(StoreUnreachable):  # the next leader tries again
            self._remove_old()

    def change(self, **changes: Any) -> bool:
        """Writes the next state if something changes; returns whether it does. It is in force once this returns."""
        wanted = replace(self.state, **changes)
        if wanted == self.state:
            return False
        self._write(wanted)
        return True

    def _write(self, wanted: DesiredState) -> None:
        self._leadership.check(self._term)
        wanted = replace(
            wanted, term=self._term, by=self._leadership.holder, t=self._now(), seq=self._writer.seq + 1
        )
        try:
            self._writer.append(lambda _: wanted.dump())
        except ObjectExists as error:
            self._leadership.lose(self._term)
            raise LeadershipLost(leader=f"{error.key} is not this one's") from error
        self.state = wanted

    def _remove_old(self) -> None:
        """Removes old states. A number must not be free again while a process may still want to write it."""
        found = numbers(self._objects, PREFIX)
        if len(found) < 2 * _KEEP:
            return
        boundary = self._objects.read(numbered_key(PREFIX, found[-_KEEP]))
        if boundary and self._now() - DesiredState.load(boundary.content).t > _YOUNG_S:
            for seq in found[:-_KEEP]:
                self._objects.remove(numbered_key(PREFIX, seq))
