"""Runs controllers as threads of which one moves at a time: a random schedule decides at every store operation.

An operation may fail before it is done, or after. A controller may be frozen at any operation, as by SIGSTOP.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fakes.cluster import SharedTime
from tests.fakes.objects import MemoryClient, MemoryObjects, unreachable

_WRITES = ("create", "replace", "put")


class Ended(BaseException):
    """The schedule is over: the thread that sees this ends."""


@dataclass
class Actor:
    """A thread that waits for its turn before each operation on the store."""

    name: str
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    done: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thawed_at: float = 0.0
    ended: bool = False


class Schedule:
    """`failing`: share of operations that fail. `freezing`: share of operations at which a controller is frozen."""

    def __init__(self, seed: int, *, failing: float, freezing: float) -> None:
        self.random = random.Random(seed)
        self.time, self.store = SharedTime(), MemoryObjects()
        self.failing, self.freezing = failing, freezing
        self.actors: list[Actor] = []
        self.groups: dict[str, list[Actor]] = {}
        self._begun = self._over = False
        self._running: dict[int, Actor] = {}
        self._threads: list[threading.Thread] = []

    def client(self) -> MemoryClient:
        """Returns a way to the store for all threads of a process. Threads that are not actors are never paused."""

        def before(operation: str, _key: str) -> None:
            actor = self._running.get(threading.get_ident())
            if actor is None:
                return
            self.pause(actor)
            if self.random.random() < self.failing:
                raise unreachable()
            if operation in _WRITES and self.random.random() < self.freezing:
                self.freeze(actor.name)
                self.pause(actor)

        def after(operation: str, _key: str) -> None:
            known = threading.get_ident() in self._running
            if known and operation in _WRITES and self.random.random() < self.failing:
                raise unreachable()

        return MemoryClient(self.store, before=before, after=after)

    def add(self, name: str, body: Callable[[Actor], None]) -> Actor:
        """Adds a thread of the process `name`. Its body runs until the schedule is over."""
        actor = Actor(name)
        self.actors.append(actor)
        self.groups.setdefault(name, []).append(actor)

        def run() -> None:
            self._running[threading.get_ident()] = actor
            try:
                self.pause(actor)
                body(actor)
            except Ended:
                pass
            finally:
                actor.ended = True
                actor.done.release()

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return actor

    def pause(self, actor: Actor) -> None:
        """Gives the turn back, and waits for the next one."""
        actor.done.release()
        actor.turn.acquire()
        if self._over:
            raise Ended

    def freeze(self, name: str) -> None:
        until = self.time.t + self.random.uniform(3.0, 25.0)
        for actor in self.groups[name]:
            actor.thawed_at = until

    def run(self, until: Callable[[], bool], *, turns: int, each_second: Callable[[], None]) -> bool:
        """Gives turns at random until `until` holds; returns whether it did."""
        if not self._begun:
            self._begun = True
            for actor in self.actors:
                actor.done.acquire()
        second = self.time.t
        for turn in range(turns):
            ready = [actor for actor in self.actors if not actor.ended and actor.thawed_at <= self.time.t]
            if ready:
                actor = self.random.choice(ready)
                actor.turn.release()
                actor.done.acquire()
            self.time.t += self.random.uniform(0.0, 0.05)
            if self.time.t - second >= 1.0:
                second = self.time.t
                each_second()
            if turn % 20 == 0 and until():
                return True
        return until()

    def end(self) -> None:
        self._over = True
        for actor in self.actors:
            actor.turn.release()
        for thread in self._threads:
            thread.join(timeout=10.0)
            assert not thread.is_alive(), "a thread of the schedule hangs"
