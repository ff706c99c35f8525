"""Leads or waits: keeps the leader's record in the store, and stops a leader that may have been replaced.

Everything that acts for the cluster calls `check` directly before. A process that was frozen finds its last renewal too
old. If it is frozen between the check and a write, the conditional write decides.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from serin.errors import LeadershipLost, ObjectChanged, ObjectExists, SerinError
from serin.formats.cluster.leader import KEY, Leader
from serin.rollout.decide.election import RENEW_S, Watch, claim, look, may_act
from serin.store.objects import Objects

logger = logging.getLogger(__name__)


def uptime() -> float:
    """Returns seconds that also count while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership:
    """One process's part in the election. `step` is called about each second, by one thread; the rest by any."""

    def __init__(self, objects: Objects, holder: str, clock: Callable[[], float] = uptime) -> None:
        self.holder = holder
        self._objects, self._clock = objects, clock
        self._lock = threading.Lock()
        self._mine: Leader | None = None  # None: not leading
        self._tag, self._renewed_at = "", 0.0
        self._watch: Watch | None = None

    @property
    def term(self) -> int | None:
        """The term in which this process leads now; None: it does not, or can no longer be sure."""
        with self._lock:
            valid = self._mine is not None and may_act(self._renewed_at, self._clock())
            return self._mine.term if valid and self._mine else None

    @property
    def leader(self) -> Leader | None:
        """The record as it was last seen."""
        return self._watch.leader if self._watch else None

    def check(self, term: int) -> None:
        """Raises LeadershipLost unless this process leads in `term` now."""
        if self.term != term:
            raise LeadershipLost(leader=self._named())

    def lose(self, term: int) -> None:
        """Gives up the leadership of `term`: something was written that this process did not write."""
        with self._lock:
            if self._mine and self._mine.term == term:
                self._mine = None

    def step(self) -> None:
        """Renews the record, or looks at it and takes over when it is time. Raises StoreUnreachable."""
        t = self._clock()
        with self._lock:
            mine = self._mine
        if mine is None:
            self._stand_by(t)
        elif not may_act(self._renewed_at, t):
            logger.warning("the leadership was not renewed for %.1f s; stepping down", t - self._renewed_at)
            self.lose(mine.term)
        else:
            self._renew(mine, t)

    def resign(self) -> None:
        """Lets another controller lead at once. Raises StoreUnreachable."""
        with self._lock:
            mine, self._mine = self._mine, None
        if mine is not None:
            try:
                self._objects.replace(KEY, Leader(holder="", term=mine.term).dump(), self._tag)
            except ObjectChanged:
                return

    def run(self, stop: threading.Event) -> None:
        """Steps until `stop` is set; a store that does not answer is asked again."""
        while not stop.is_set():
            began = self._clock()
            try:
                self.step()
            except (SerinError, OSError) as error:
                logger.warning("the leader's record cannot be read or renewed: %s", error)
            stop.wait(max(0.0, RENEW_S - (self._clock() - began)))

    def _stand_by(self, t: float) -> None:
        found = self._objects.read(KEY)
        try:
            leader = Leader.load(found.content) if found else None
        except (ValueError, TypeError, KeyError) as error:
            raise LeadershipLost(leader=f"{KEY} cannot be read: {error}") from error
        self._watch = look(self._watch, leader, t)
        wanted = claim(self._watch, t, self.holder)
        if wanted is None:
            return
        try:
            content = wanted.dump()
            tag = (
                self._objects.replace(KEY, content, found.tag)
                if found
                else self._objects.create(KEY, content)
            )
        except (ObjectChanged, ObjectExists):
            return  # another one was faster
        self._lead(wanted, tag, t)

    def _renew(self, mine: Leader, t: float) -> None:
        wanted = Leader(holder=mine.holder, term=mine.term, beat=mine.beat + 1)
        try:
            tag = self._objects.replace(KEY, wanted.dump(), self._tag)
        except ObjectChanged:
            found = self._objects.read(KEY)
            if found is None or not self._is_mine(found.content, mine):
                logger.warning("another controller has taken over; stepping down")
                self.lose(mine.term)
                return
            wanted, tag = Leader.load(found.content), found.tag  # an answer was lost on the way
        self._lead(wanted, tag, t)

    def _is_mine(self, content: bytes, mine: Leader) -> bool:
        try:
            found = Leader.load(content)
        except (ValueError, TypeError, KeyError):
            return False
        return (found.holder, found.term) == (mine.holder, mine.term)

    def _lead(self, leader: Leader, tag: str, began: float) -> None:
        with self._lock:
            first = self._mine is None
            if first and leader.beat:
                return  # given up while the renewal was on its way
            self._mine, self._tag, self._renewed_at = leader, tag, began
        self._watch = Watch(leader=leader, since=began)
        if first:
            logger.info("%s leads in term %d", self.holder, leader.term)

    def _named(self) -> str:
        leader = self.leader
        return leader.holder if leader and leader.holder not in ("", self.holder) else "unknown"
