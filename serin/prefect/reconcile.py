"""Finds runs whose process is gone and reports them to the Prefect server, which would show them as running forever.

A run's process is found by a scan of the machine (host/process_scan.py), so neither the worker that started it nor a
reused pid can mislead. The kernel has freed the locks of the dead process, and so its leases. Rollouts are left alone:
they belong to the controller and continue without a run that follows them.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from serin.errors import StackError, SupervisorGone
from serin.host.process_scan import RunProcesses, end_processes, process_began, run_processes
from serin.host.standing import run_standing
from serin.host.state import POOLS, Stack, read_stack
from serin.host.supervisor import Supervisor
from serin.host.wiring import worker_name
from serin.machine.heartbeat import beat
from serin.prefect.login import stack_api
from serin.prefect.processes import workers_of
from serin.prefect.rest_api import PAGE, Api, call, is_elsewhere, query, query_all

GRACE_S = 10.0  # a process that has just ended, or its worker, has this long to report how it ended
STARTING_S = 120.0  # a live worker may take this long to start the process of a run that it has taken
REQUEUES = 3  # a requested run is queued again at most this often

_UNDER_WAY = frozenset({"RUNNING", "PAUSED", "CANCELLING"})
# Prefect's messages for a run that got SIGTERM.
_ASKED_TO_STOP = ("cancelled by the runtime environment", "terminated by", "status code -15")
_QUEUED_AGAIN = "queued again"
_STILL_WAITS = ("Late", "AwaitingConcurrencySlot")  # Prefect's names for a run that keeps waiting
log = logging.getLogger("serin.prefect.reconciler")  # not __name__, which is __main__ here

LOOK_S = 5.0
_WAITS_S = 60.0  # for a Prefect server that is busy


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


_LOOKED_AT = ("RUNNING", "PENDING", "PAUSED", "CANCELLING")
_SAVE_S = 15.0  # the remaining processes of a run may save its work for this long
_NEWEST = "EXPECTED_START_TIME_DESC"
_WORKER_LABEL = "prefect.worker.name"  # Prefect's workers put this label on runs that they take

_STATES: Mapping[Fate, dict[str, Any]] = {
    Fate.CRASHED: {
        "type": "CRASHED",
        "name": "Crashed",
        "message": "its process is gone; `serin run --resume` resumes it",
    },
    Fate.CANCELLED: {"type": "CANCELLED", "name": "Cancelled", "message": "its process is gone"},
}


class Reconciler:
    """Checks all runs of the stack in `home` repeatedly; remembers since when a process is missing.

    `workers`: the names of this stack's workers on a shared server: runs that other workers took are ignored, because
    their processes cannot be seen here. None: the server is the stack's own, and so is every run on it.
    """

    def __init__(
        self, home: Path, api: Api, *, stack_since: float, workers: Collection[str] | None = None
    ) -> None:
        self._home, self._api, self._stack_since = home, api, stack_since
        self._ours = workers
        self._missing: dict[str, float] = {}
        self._orphans: dict[str, float] = {}

    def look(self) -> list[str]:
        """Returns what was found and done, as messages. Callers must survive PrefectGone and PrefectRefused."""
        now, found = time.monotonic(), run_processes(self._home)
        runs = self._read_runs({"state": {"type": {"any_": list(_LOOKED_AT)}}})
        known = {run.id: run for run in runs}
        gone = [run for run in known if run not in found or not found[run].engines]
        self._missing = {run: self._missing.get(run, now) for run in gone}
        workers = self._workers()
        said = [
            words
            for run, since in self._missing.items()
            if (words := self._settle(known[run], now - since, workers.get(known[run].pool)))
        ]
        said += self._end_orphans(found, now)
        return said + self._requeue(found)

    @property
    def waits(self) -> bool:
        """Returns whether something was found that needs another check to be certain."""
        return bool(self._missing or self._orphans)

    def _settle(self, run: Run, missing_s: float, worker_since: float | None) -> str | None:
        fate = judge(run, missing_s=missing_s, worker_since=worker_since)
        if fate is Fate.LEAVE:
            return None
        if fate is Fate.REQUEUE:
            return self._queue_again(run, "the worker that had taken it has not started it")
        _set_state(self._api, f"/flow_runs/{run.id}", _STATES[fate])
        for inside in _unfinished_inside(self._api, run):
            _set_state(self._api, inside, _STATES[fate])
        return f"{run.name} is {fate}: it had no process for {missing_s:.0f} s"

    def _end_orphans(self, found: Mapping[str, RunProcesses], now: float) -> list[str]:
        """Ends processes of a run whose main process is gone: nobody waits for their results."""
        headless = {run: left.others for run, left in found.items() if not left.engines}
        self._orphans = {run: self._orphans.get(run, now) for run in headless}
        said = []
        for run, since in self._orphans.items():
            if now - since >= GRACE_S:
                end_processes(headless[run], grace_s=_SAVE_S)
                said.append(f"ended {len(headless[run])} process(es) that run {run} has left behind")
        return said

    def _requeue(self, found: Mapping[str, RunProcesses]) -> list[str]:
        since = datetime.fromtimestamp(self._stack_since, UTC).isoformat()
        crashed = {"state": {"type": {"any_": ["CRASHED"]}}, "end_time": {"after_": since}}
        said = []
        for run in self._read_runs(crashed):
            if run.id in found or not was_preempted(run, stack_since=self._stack_since):
                continue
            if was_being_cancelled(self._history(run)):  # its worker ended before it could report that
                _set_state(self._api, f"/flow_runs/{run.id}", _STATES[Fate.CANCELLED])
                said.append(f"{run.name} is {Fate.CANCELLED}")
            else:
                said.append(self._queue_again(run, "it was asked to stop and will resume"))
        return said

    def _history(self, run: Run) -> list[Past]:
        states = call(self._api, "GET", f"/flow_run_states/?flow_run_id={run.id}")
        in_order = sorted(states, key=lambda state: datetime.fromisoformat(state["timestamp"]))
        return [
            Past(type=state["type"], name=state["name"] or "", message=state["message"] or "")
            for state in in_order
        ]

    def _queue_again(self, run: Run, why: str) -> str:
        """Queues a run again, unless that was done too often; then it fails with a message that says so."""
        before = times_queued_again(self._history(run))
        if before < REQUEUES:
            words = queued_again(before + 1, why)
            schedule_again(self._api, run.id, words)
        else:
            words = not_queued_again(run)
            _set_state(self._api, f"/flow_runs/{run.id}", {**_STATES[Fate.CRASHED], "message": words})
        return f"{run.name} is {words}"

    def _read_runs(self, wanted: Mapping[str, Any]) -> list[Run]:
        ours, pools = self._ours, {"name": {"any_": list(POOLS)}}
        found = query_all(self._api, "flow_runs", flow_runs=wanted, work_pools=pools, sort=_NEWEST)
        here = [run for run in map(_run, found) if not run.elsewhere]
        return [run for run in here if ours is None or run.worker in ours]

    def _workers(self) -> dict[str, float]:
        """Returns when the live worker of each pool started."""
        try:
            children = Supervisor(self._home).children()
        except SupervisorGone:  # then nothing starts anything
            return {}
        found = {}
        for child in children:
            for pool in POOLS:
                if child.name == worker_name(pool) and child.pid:
                    began = process_began(child.pid)
                    if began is not None:
                        found[pool] = began
        return found


def build_reconciler(stack: Stack) -> Reconciler:
    ours = {*workers_of(stack.home)}  # other hosts may have workers in the same pools
    if stack.owns_prefect:
        ours.add("")  # a run that was taken without a note of its worker
    return Reconciler(stack.home, stack_api(stack), stack_since=stack.since, workers=ours)


def _run(found: Mapping[str, Any]) -> Run:
    state = found["state"] or {}
    details = state.get("state_details") or {}
    return Run(
        id=found["id"],
        name=found["name"],
        pool=found.get("work_pool_name") or "",
        state=found["state_type"],
        since=datetime.fromisoformat(state["timestamp"]).timestamp(),
        message=state.get("message") or "",
        worker=str((found.get("labels") or {}).get(_WORKER_LABEL, "")),
        elsewhere=is_elsewhere(found),
        placed=found.get("parent_task_run_id") is not None,
        suspended=bool(details.get("pause_reschedule")),
    )


def _unfinished_inside(api: Api, run: Run) -> list[str]:
    """Returns what ran in the same process: tasks, and flows that were called. A placed run has its own pool."""
    open_states = {"type": {"any_": ["RUNNING", "PENDING"]}}
    by_id, below = (
        {"id": {"any_": [run.id]}},
        {"parent_flow_run_id": {"any_": [run.id]}, "state": open_states},
    )
    tasks = query(api, "task_runs", flow_runs=by_id, task_runs={"state": open_states}, limit=PAGE)
    flows = query(api, "flow_runs", flow_runs=below, limit=PAGE)
    return [
        *(f"/task_runs/{found['id']}" for found in tasks),
        *(f"/flow_runs/{found['id']}" for found in flows if not found["work_pool_name"]),
    ]


def schedule_again(api: Api, run_id: str, why: str) -> None:
    """Does what a retry in the interface does: the same run starts again and finds its earlier results."""
    state = {
        "type": "SCHEDULED",
        "name": "AwaitingRetry",
        "message": why,
        "state_details": {"scheduled_time": datetime.now(UTC).isoformat()},
    }
    _set_state(api, f"/flow_runs/{run_id}", state)


def _set_state(api: Api, of: str, state: Mapping[str, Any]) -> None:
    call(api, "POST", f"{of}/set_state", {"state": dict(state), "force": True})


# It needs no clean exit: supervisord restarts it after a crash, and it only forgets since when a process is missing. It
# waits for a Prefect server that does not answer.
def run(home: Path, stop: threading.Event) -> None:
    """Checks until `stop` is set."""
    stack = read_stack(home)
    if stack is None:
        sys.exit(f"no stack was ever started in {home}")
    reconciler = build_reconciler(stack)
    log.info("the reconciler has started")
    silent = False
    while not stop.is_set():
        beat()
        try:
            for line in reconciler.look():
                log.info(line)
            silent = False
        except (OSError, StackError) as error:
            if not silent:  # once is enough for a server that is being restarted
                log.warning("this check failed and will be repeated: %s", error)
            silent = True
        beat(within_s=LOOK_S)
        stop.wait(LOOK_S)
    log.info("the reconciler has stopped")


if __name__ == "__main__":
    run_standing("the reconciler", run, waits_s=_WAITS_S)
