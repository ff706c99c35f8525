"""What the controller needs of the world. Each is small; tests/fakes has one of each written by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from serin.formats.serving.journal import Decision, Keep
from serin.rollout.decide.advance import ReleaseState
from serin.rollout.decide.state import Rollout
from serin.rollout.decide.verdict import Judgement
from serin.rollout.run.commands import Answer, Command
from serin.store.artifacts import Endpoint, ModelRoute, Release


class Router(Protocol):
    """The gateway."""

    def apply(self, routes: Sequence[ModelRoute]) -> None:
        """All models at once; when it returns, traffic goes that way. SerinError when the gateway does not take it."""
        ...

    def active_requests(self, release: Release) -> int: ...


class Processes(Protocol):
    """The releases' processes. `start` and `stop` may be repeated; neither needs to wait for the effect."""

    def start(self, release: Release) -> None: ...

    def state(self, release: Release) -> ReleaseState: ...

    def instance(self, release: Release) -> int | None:
        """Which of its processes runs: another number after a restart. None: it cannot be known."""
        ...

    def endpoint(self, release: Release) -> Endpoint: ...

    def verify(self, release: Release) -> None:
        """SerinError when the release does not answer its golden rows as it should. Asked beside the tick."""
        ...

    def stop(self, release: Release) -> None: ...

    def running(self) -> Sequence[Release]: ...


class Fleet(Processes, Protocol):
    def check_fits(self, release: Release, stable: Release) -> None:
        """SerinError when `release` is known to refuse what clients of `stable` send, or to answer in another form."""
        ...


class Judge(Protocol):
    def judge(self, rollout: Rollout, t: float) -> Judgement:
        """What is to be said at time `t` of a rollout that is shifting or baking. Keeps its memory in the evidence."""
        ...


class Journal(Protocol):
    def append(self, decision: Decision) -> Decision:
        """Returns when the decision is on disk."""
        ...

    def all(self) -> list[Decision]: ...

    def compact(self, keep: Keep) -> bool:
        """Leaves out what `keep` does not name, if the journal has become large; True when that was done."""
        ...

    def close(self) -> None: ...


class Journals(Protocol):
    """One journal per model; opening one makes this process the only one that decides for the model."""

    def models(self) -> Sequence[str]: ...

    def open(self, model: str) -> Journal: ...


class Versions(Protocol):
    """The store, as far as a rollout is concerned. None removes an alias."""

    def versions(self, model: str) -> Sequence[int]: ...

    def aliases(self, model: str) -> Mapping[str, int]: ...

    def set_alias(self, model: str, alias: str, version: int | None) -> None: ...


class Commands(Protocol):
    def pending(self) -> Sequence[Command]: ...

    def answer(self, answer: Answer) -> None:
        """Also takes the command away."""
        ...


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since 1970, for the journals: their times must mean the same after a restart."""
        ...

    def steady(self) -> float:
        """Seconds since whenever: for what is timed and never written down."""
        ...

    def follow(self, *, not_before: float = 0.0) -> None:
        """Take over the machine's time, or `not_before` if that is later. For when nothing is being timed by `now`."""
        ...


class EvenClock:
    """Passes evenly between two calls of `follow`: no step and no bake is shorter or longer because somebody, or NTP,
    has set the machine's clock meanwhile."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def now(self) -> float:
        return self._ahead + time.monotonic()

    def steady(self) -> float:
        return time.monotonic()

    def follow(self, *, not_before: float = 0.0) -> None:
        self._ahead = max(time.time(), not_before) - time.monotonic()
