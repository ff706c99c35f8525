"""What becomes of a run whose process is gone. Pure: what is seen goes in, what is to be done comes out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

GRACE_S = 10.0  # a process that has just ended, or its worker, still has this long to say how it ended
STARTING_S = (
    120.0  # a worker that lives may take this long until the process of a run that it has taken is there
)
REQUEUES = 3  # a run is started at most so often

_UNDER_WAY = frozenset({"RUNNING", "PAUSED", "CANCELLING"})
# Prefect's words for a run that got SIGTERM and was not cancelled by a person.
_ASKED_TO_STOP = ("cancelled by the runtime environment", "terminated by", "status code: -15")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as the server tells of it."""

    id: str
    name: str
    pool: str
    state: str  # Prefect's type of state: RUNNING, ...
    since: float  # that it is in this state
    message: str = ""
    starts: int = 0  # so far
    placed: bool = False  # by a pipeline, which asks for it again itself
    suspended: bool = False  # paused without a process, on purpose


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
    """Whether a run that is recorded as crashed was asked to stop from outside, in this stack's time, and may be
    started again: not what `serin down` has ended, nor what fails each time, nor what its pipeline asks for again."""
    asked = any(words in run.message.lower() for words in _ASKED_TO_STOP)
    return (
        run.state == "CRASHED"
        and asked
        and run.since >= stack_since
        and run.starts < REQUEUES
        and not run.placed
    )
