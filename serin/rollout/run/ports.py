"""The interfaces that the controller needs. Each is small; tests/fakes has a hand-written fake of each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from serin.formats.serving.journal import Decision, Keep
from serin.rollout.decide.state import Rollout
from serin.store.artifacts import Endpoint, ModelRoute, Release

if TYPE_CHECKING:
    from serin.rollout.decide.advance import ReleaseState
    from serin.rollout.decide.verdict import Judgement


class Router(Protocol):
    """The gateway."""

    def apply(self, routes: Sequence[ModelRoute]) -> None:
        """Applies the routes of all models at once, before it returns. Raises SerinError when the gateway rejects
        them."""
        ...

    def active_requests(self, release: Release) -> int: ...


class Processes(Protocol):
    """The releases' processes. `start` and `stop` may be repeated; neither needs to wait for its effect."""

    def start(self, release: Release) -> None: ...

    def state(self, release: Release) -> ReleaseState: ...

    def instance(self, release: Release) -> int | None:
        """Returns a number that identifies the running process and changes after a restart. None: unknown."""
        ...

    def endpoint(self, release: Release) -> Endpoint: ...

    def verify(self, release: Release) -> None:
        """Raises SerinError when the release does not answer its golden rows correctly. Runs beside the tick."""
        ...

    def stop(self, release: Release) -> None: ...

    def running(self) -> Sequence[Release]: ...


class Fleet(Processes, Protocol):
    def check_fits(self, release: Release, stable: Release, *, share: bool) -> None:
        """Raises SerinError when `release` rejects what clients of `stable` send, or answers in another form. `share`:
        both will answer the same clients for a time."""
        ...


class Judge(Protocol):
    def judge(self, rollout: Rollout, t: float) -> Judgement:
        """Returns the judgement at time `t` on a rollout that is shifting or baking. Its state is kept in the
        evidence."""
        ...


class Replay(Protocol):
    """Recorded requests that another process sends to a candidate."""

    def take(self) -> Sequence[Mapping[str, Any]]:
        """Returns the reports since the last call, without waiting: a batch (decide/shadow.py), `waiting` or `unable`
        with a reason. Raises ReplayEnded when the process is gone."""
        ...

    def stop(self) -> None: ...


class Replayer(Protocol):
    def check(self, rollout: Rollout) -> None:
        """Raises RolloutRefused when there are no recorded requests that could be sent."""
        ...

    def start(self, rollout: Rollout, place: Mapping[str, Any]) -> Replay:
        """Starts to send recorded requests to the candidate, from the place of an earlier batch on."""
        ...


class Journal(Protocol):
    @property
    def waiting(self) -> int:
        """How many urgent decisions count and are not recorded yet."""
        ...

    def append(self, decision: Decision, *, urgent: bool = False) -> Decision:
        """Returns when the decision is on disk. An urgent one is not waited for where the disk does not take it."""
        ...

    def flush(self) -> None:
        """Records the decisions that wait, else raises OSError."""
        ...

    def all(self) -> list[Decision]: ...

    def compact(self, keep: Keep) -> bool:
        """Drops the decisions not in `keep` if the journal has become large; True when it did."""
        ...


class Journals(Protocol):
    """One journal per model; opening one makes this process the only one that decides for the model."""

    def models(self) -> Sequence[str]: ...

    def open(self, model: str) -> Journal: ...


class Versions(Protocol):
    """The part of the store that a rollout needs. A version is its number, or its number and edition (`3e2`). None
    removes an alias."""

    def editions(self, model: str, version: int) -> Sequence[int]: ...

    def aliased(self, model: str) -> Mapping[str, Release]: ...

    def set_alias(self, model: str, alias: str, version: str | None) -> None: ...


class EvenClock:
    """A clock that runs evenly between two calls of `follow`.

    No step and no bake becomes shorter or longer because the machine's clock was set in the meantime, by a person or by
    NTP.
    """

    def __init__(self) -> None:
        self._ahead = time.time() - self.steady()

    def now(self) -> float:
        """Returns seconds since 1970, for the journals: their times must mean the same after a restart."""
        return self._ahead + self.steady()

    def steady(self) -> float:
        """Returns monotonic seconds, for durations that are never stored."""
        return time.monotonic()

    def follow(self, *, not_before: float = 0.0) -> None:
        """Adopts the machine's time, or `not_before` if that is later. Call it only while nothing is timed by `now`."""
        self._ahead = max(time.time(), not_before) - self.steady()
