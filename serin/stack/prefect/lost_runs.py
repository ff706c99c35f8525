"""Decides what happens to a run whose process is gone. Pure: observations go in, a decision comes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

GRACE_S = 10.0  # a process that has just ended, or its worker, has this long to report how it ended
STARTING_S = 120.0  # a live worker may take this long to start the process of a run that it has taken
REQUEUES = 3  # a requested run is queued again at most this often

_UNDER_WAY = frozenset({"RUNNING", "PAUSED", "CANCELLING"})
# Prefect's messages for a run that got SIGTERM.
_ASKED_TO_STOP = ("cancelled by the runtime environment", "terminated by", "status code -15")
_QUEUED_AGAIN = "queued again"
_STILL_WAITS = ("Late", "AwaitingConcurrencySlot")  # Prefect's names for a run that keeps waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as the server reports it."""

    id: str
    name: str
    pool: str
    state: str  # Prefect's type of state: RUNNING, ...
    since: float  # the start of this state
    message: str = ""
    worker: str = ""  # the name of the one that took it last
    elsewhere: bool = False  # its process is not on this machine: a job of a cluster
    placed: bool = False  # by a pipeline, which requests it again itself
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
    """Decides the fate of a run.

    `missing_s`: for how long no process of the run was found. `worker_since`: when the live worker of its pool started,
    None when there is none: runs taken by an earlier worker are started by nobody.
    """
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
    """Returns whether a crashed run was asked to stop from outside, while this stack was up.

    That excludes runs ended by `serin down`, runs that failed by themselves, and runs that their pipeline requests
    again.
    """
    asked = any(words in run.message.lower() for words in _ASKED_TO_STOP)
    return run.state == "CRASHED" and asked and run.since >= stack_since and not run.placed


def times_queued_again(history: Iterable[Past]) -> int:
    """Counts how often the run was queued again by the reconciler since somebody requested it.

    `history`: its states, the oldest first. It is the server's, so that no restart resets the count.
    """
    count = 0
    for past in history:
        if past.type == "SCHEDULED" and past.name not in _STILL_WAITS:
            count = count + 1 if past.message.startswith(_QUEUED_AGAIN) else 0
    return count


def was_being_cancelled(history: Sequence[Past]) -> bool:
    """Returns whether somebody cancelled the run after it was last queued. `history`: its states, the oldest first."""
    cancelling = False
    for past in history:
        if past.type == "SCHEDULED" and past.name not in _STILL_WAITS:
            cancelling = False
        cancelling = cancelling or past.type == "CANCELLING"
    return cancelling


def queued_again(number: int, why: str) -> str:
    """Returns the message for the run's page."""
    return f"{_QUEUED_AGAIN} ({number} of {REQUEUES}): {why}"


def not_queued_again(run: Run) -> str:
    if run.state == "PENDING":
        why = f"no process of it ever started: read the log of worker-{run.pool} (`serin status` names its folder)"
    else:
        why = "it was asked to stop each time"
    return f"not queued again after {REQUEUES} times: {why}; `serin run --resume` tries again"
