"""What the end of a Slurm job means for its flow run. Pure: states go in, a decision comes out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

_ENDED = {
    "COMPLETED": "exited without reporting how the run ended",
    "CANCELLED": "was cancelled in Slurm",
    "FAILED": "failed",
    "TIMEOUT": "reached its time limit before its work was saved; raise time_minutes or stop_before_s of the pool",
    "NODE_FAIL": "lost its node",
    "PREEMPTED": "was preempted and not requeued",
    "BOOT_FAIL": "could not start: its node did not boot",
    "DEADLINE": "reached its deadline",
    "OUT_OF_MEMORY": "ran out of memory; raise memory_gb of the pool",
    "REVOKED": "was revoked",
}
_WAITS = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
_FINAL = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED"}
)  # a run that is CRASHED may have been stopped with its job
_NOT_OURS = frozenset({"SCHEDULED", "PAUSED"})  # queued again, or suspended on purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as squeue shows it. `name`: the id of its flow run. `qos`: its quality of service, where Slurm has any."""

    id: int
    name: str
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    qos: str = ""

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def waits(self) -> bool:
        return self.state in _WAITS

    def __str__(self) -> str:
        if self.waits:
            again = f", started {self.restarts} times before" if self.restarts else ""
            return f"Slurm job {self.id} waits ({self.reason or 'no reason given'}{again})"
        if self.ended:
            return f"Slurm job {self.id} {_ENDED[self.state]}"
        where = f" on {self.nodes}" if self.nodes else ""
        return f"Slurm job {self.id} is {self.state.lower()}{where}"


class Fate(StrEnum):
    """The state that a run gets; LEAVE: its own says enough."""

    LEAVE = "LEAVE"
    CRASHED = "CRASHED"
    CANCELLED = "CANCELLED"


def fate_of(job: Job | None, run_state: str) -> Fate:
    """Decides how a run ends whose job has ended. `job`: None when Slurm does not know it any more.

    `run_state`: Prefect's type of state. A job that was cancelled gets SIGTERM, and its run may have reported a crash
    before: that run was cancelled, and nobody should request it again.
    """
    if run_state in _FINAL or run_state in _NOT_OURS:
        return Fate.LEAVE
    if run_state == "CANCELLING" or (job is not None and job.state == "CANCELLED"):
        return Fate.CANCELLED
    return Fate.LEAVE if run_state == "CRASHED" else Fate.CRASHED


def newest(jobs: Iterable[Job]) -> Job | None:
    """Returns the job that counts of those with one name: one that has not ended, else the last."""
    return max(jobs, key=lambda job: (not job.ended, job.id), default=None)
