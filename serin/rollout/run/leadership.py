"""Leads or waits: keeps the leader's record in the store, and stops a leader that may have been replaced.

Everything that acts for the cluster calls `check` directly before. A process that was frozen finds its last renewal too
old. If it is frozen between the check and a write, the conditional write decides.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol, Self

from serin.errors import JournalHeld, LeadershipLost, ObjectChanged, ObjectExists, SerinError
from serin.formats.cluster.leader import KEY, Leader
from serin.machine import environment
from serin.machine.durable import make_private
from serin.machine.locks import try_lock
from serin.store.objects import Objects, swap

logger = logging.getLogger(__name__)

_RENEW_S: Final = 1.0  # a leader renews its record this often
_VALID_S: Final = 4.0  # a leader acts only for this long after it began to renew
_SILENT_S: Final = 5.0  # a record that has not changed for this long may be taken over


def uptime() -> float:
    """Returns seconds that also count while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def new_holder() -> str:
    """Returns the name of this process as a leader, which no other process ever has."""
    return f"{environment.host()}/{os.getpid()}-{secrets.token_hex(3)}"


class Leads(Protocol):
    """What a process that acts for others asks before it does."""

    @property
    def holder(self) -> str: ...

    def check(self, term: int) -> None:
        """Raises LeadershipLost unless this process leads in `term` now."""
        ...

    def lose(self, term: int) -> None:
        """Gives up the leadership of `term`: something was written that this process did not write."""
        ...


class HomeLock:
    """The leadership of a home: the lock of a file, which the kernel gives back when its process ends. Use it as a
    context manager. Raises JournalHeld while another process leads."""

    term: Final = 1

    def __init__(self, home: Path) -> None:
        self.holder = new_holder()
        path = make_private(home) / "rollouts" / "controller.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lost = False
        if not try_lock(self._file):
            os.close(self._file)
            raise JournalHeld(path=path)

    def check(self, term: int) -> None:
        if self._lost or term != self.term:
            raise LeadershipLost(leader="unknown")

    def lose(self, term: int) -> None:
        self._lost = self._lost or term == self.term

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Leadership:
    """One process's part in the election. `step` is called about each second, by one thread; the rest by any. `key`:
    of the leader's record."""

    def __init__(
        self, objects: Objects, holder: str, clock: Callable[[], float] = uptime, key: str = KEY
    ) -> None:
        self.holder, self._key = holder, key
        self._objects, self._clock = objects, clock
        self._lock = threading.Lock()
        self._mine: Leader | None = None  # None: not leading
        self._tag, self._renewed_at = "", 0.0
        self.leader: Leader | None = None
        """The record as it was last seen."""
        self._unchanged_since: float | None = None  # by this process's clock; None: it was not looked at yet

    @property
    def term(self) -> int | None:
        """The term in which this process leads now; None: it does not, or can no longer be sure."""
        with self._lock:
            return self._mine.term if self._mine and self._may_act(self._clock()) else None

    def _may_act(self, t: float) -> bool:
        return t - self._renewed_at <= _VALID_S

    def check(self, term: int) -> None:
        """Raises LeadershipLost unless this process leads in `term` now."""
        if self.term != term:
            known = self.leader and self.leader.holder not in ("", self.holder)
            raise LeadershipLost(leader=self.leader.holder if self.leader and known else "unknown")

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
        elif not self._may_act(t):
            logger.warning("the leadership was not renewed for %.1f s; stepping down", t - self._renewed_at)
            self.lose(mine.term)
        else:
            self._renew(mine, t)

    def resign(self) -> None:
        """Lets another process lead at once. Raises StoreUnreachable."""
        with self._lock:
            mine, self._mine = self._mine, None
        if mine is not None:
            try:
                self._objects.replace(self._key, Leader(holder="", term=mine.term).dump(), self._tag)
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
            stop.wait(max(0.0, _RENEW_S - (self._clock() - began)))

    def _stand_by(self, t: float) -> None:
        stored = self._objects.read(self._key)
        try:
            leader = Leader.load(stored.content) if stored else None
        except (ValueError, TypeError, KeyError) as error:
            raise LeadershipLost(leader=f"{self._key} cannot be read: {error}") from error
        if self._unchanged_since is None or leader != self.leader:
            self.leader, self._unchanged_since = leader, t
        # A record with my own name is one whose leadership I gave up, because I was not sure of what I had written.
        silent = t - self._unchanged_since >= _SILENT_S
        if leader is not None and leader.holder not in ("", self.holder) and not silent:
            return
        claim = Leader(holder=self.holder, term=leader.term + 1 if leader else 1)
        try:
            tag = swap(self._objects, self._key, claim.dump(), stored.tag if stored else None)
        except (ObjectChanged, ObjectExists):
            return  # another one was faster
        self._lead(claim, tag, t)

    def _renew(self, mine: Leader, t: float) -> None:
        renewed = Leader(holder=mine.holder, term=mine.term, beat=mine.beat + 1)
        try:
            tag = self._objects.replace(self._key, renewed.dump(), self._tag)
        except ObjectChanged:
            stored = self._objects.read(self._key)
            written = None
            with suppress(ValueError, TypeError, KeyError):
                written = Leader.load(stored.content) if stored else None
            if not stored or not written or (written.holder, written.term) != (mine.holder, mine.term):
                logger.warning("another process has taken over; stepping down")
                self.lose(mine.term)
                return
            renewed, tag = written, stored.tag  # an answer was lost on the way
        self._lead(renewed, tag, t)

    def _lead(self, leader: Leader, tag: str, began: float) -> None:
        with self._lock:
            first = self._mine is None
            if first and leader.beat:
                return  # given up while the renewal was on its way
            self._mine, self._tag, self._renewed_at = leader, tag, began
        self.leader, self._unchanged_since = leader, began
        if first:
            logger.info("%s leads in term %d", self.holder, leader.term)
