"""What becomes of a run whose process is gone. Pure: what is seen goes in, what is to be done comes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

GRACE_S = 10.0  # a process that has just ended, or its worker, still has this long to say how it ended
STARTING_S = (
    120.0  # a worker that lives may take this long until the process of a run that it has taken is there
)
REQUEUES = 3  # a run that somebody has asked for is queued again at most so often

_UNDER_WAY = frozenset({"RUNNING", "PAUSED", "CANCELLING"})
# Prefect's words for a run that got SIGTERM.
_ASKED_TO_STOP = ("cancelled by the runtime environment", "terminated by", "status code -15")
_QUEUED_AGAIN = "queued again"
_STILL_WAITS = ("Late", "AwaitingConcurrencySlot")  # Prefect's names for a run that goes on to wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as the server tells of it."""

    id: str
    name: str
    pool: str
    state: str  # Prefect's type of state: RUNNING, ...
    since: float  # that it is in this state
    message: str = ""
    worker: str = ""  # the name of the one that took it last
    placed: bool = False  # by a pipeline, which asks for it again itself
    suspended: bool = False  # paused without a process, on purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A state that a run was in."""

    type: str
    name: str
    message: str = ""


class Fate(StrEnum):
    LEAVE = "leave"
    CRASHED = "crashed"
    CANCELLED = "cancelled"
    REQUEUE = "requeue"


def judge(run: Run, *, missing_s: float, worker_since: float | None) -> Fate:
    """`missing_s`: for how long no process of the run was found. `worker_since`: when the worker of its pool began that
    lives now, None when none does: what was taken by one before it is started by nobody."""
    if run.state in _UNDER_WAY:
        if missing_s < GRACE_S or run.suspended:
            return Fate.LEAVE
        return Fate.CANCELLED if run.state == "CANCELLING" else Fate.CRASHED
    if run.state == "PENDING":
        taken_by_the_living = worker_since is not None and worker_since <= run.since
        patience_s = STARTING_S if taken_by_the_living else GRACE_S
        return Fate.REQUEUE if missing_s >= patience_s and worker_since is not None else Fate.LEAVE
    return Fate.LEAVE


def was_preempted(run: Run, *, stack_since: float) -> bool:
    """Whether a run that is recorded as crashed was asked to stop from outside, in this stack's time: not what
    `serin down` has ended, nor what fails by itself, nor what its pipeline asks for again."""
    asked = any(words in run.message.lower() for words in _ASKED_TO_STOP)
    return run.state == "CRASHED" and asked and run.since >= stack_since and not run.placed


def times_queued_again(history: Iterable[Past]) -> int:
    """By us, since somebody has asked for the run. `history`: its states, the oldest first. It is the server's, so that
    no restart of ours begins to count anew."""
    count = 0
    for past in history:
        if past.type == "SCHEDULED" and past.name not in _STILL_WAITS:
            count = count + 1 if past.message.startswith(_QUEUED_AGAIN) else 0
    return count


def was_being_cancelled(history: Sequence[Past]) -> bool:
    """Whether somebody cancelled the run after it was queued last. `history`: its states, the oldest first."""
    cancelling = False
    for past in history:
        if past.type == "SCHEDULED" and past.name not in _STILL_WAITS:
            cancelling = False
        cancelling = cancelling or past.type == "CANCELLING"
    return cancelling


def queued_again(number: int, why: str) -> str:
    """What the run's page says then."""
    return f"{_QUEUED_AGAIN} ({number} of {REQUEUES}): {why}"


def not_queued_again(run: Run) -> str:
    if run.state == "PENDING":
        why = (
            f"no process of it ever came: read the log of worker-{run.pool} (`serin status` names its folder)"
        )
    else:
        why = "it was asked to stop each time"
    return f"not queued again after {REQUEUES} times: {why}; `serin run --resume` tries once more"
