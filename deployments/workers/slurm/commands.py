"""Calls Slurm's commands: sbatch, squeue, scancel, scontrol. They need no accounting database."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import anyio

from serin.errors import SlurmRefused, SlurmSilent
from serin.machine import environment

from .job_states import Job

_PATIENCE_S = 60.0  # sbatch itself waits for a controller that is busy
_FRESH_S = 1.0
_FIELDS = "JobID:|,Name:|,State:|,RestartCnt:|,Reason:|,NodeList:|,QOS:|"
# What the commands say when slurmctld or munge does not answer, which is not an answer about a job.
_SILENT = (
    "unable to contact",
    "connection refused",
    "timed out",
    "zero bytes",
    "munge",
    "socket",
    "communication",
)
_UNKNOWN_JOB = "invalid job id"


class Slurm:
    """A Slurm cluster as its user sees it. What squeue says is remembered for a moment, for all who ask."""

    def __init__(self) -> None:
        self._asking = anyio.Lock()
        self._read_at = -_FRESH_S
        self._jobs: list[Job] = []

    async def submit(self, options: Sequence[str], script: str, variables: Mapping[str, str]) -> int:
        """Submits a batch script; returns the job's id."""
        said = await _call(["sbatch", *options], stdin=script, variables=variables)
        self._read_at = -_FRESH_S
        return int(said.partition(";")[0])

    async def jobs(self) -> list[Job]:
        """Returns the jobs of this user that Slurm knows, with those that ended in the last minutes."""
        async with self._asking:
            if time.monotonic() - self._read_at >= _FRESH_S:
                self._jobs = parse_jobs(
                    await _call(["squeue", "--me", "--noheader", "--states=all", "-O", _FIELDS])
                )
                self._read_at = time.monotonic()
            return self._jobs

    async def cancel(self, job: int) -> None:
        """Ends a job: SIGTERM, and SIGKILL after the cluster's KillWait. A job that has ended is left alone."""
        try:
            await _call(["scancel", str(job)])
        except SlurmRefused as refusal:
            if _UNKNOWN_JOB not in refusal.fields["reason"].lower():
                raise
        self._read_at = -_FRESH_S

    async def exit_code(self, job: int) -> str | None:
        """Returns `code:signal` of a job that has ended; None when Slurm has forgotten it."""
        try:
            said = await _call(["scontrol", "--oneliner", "show", "job", str(job)])
        except SlurmRefused:
            return None
        return next((word[9:] for word in said.split() if word.startswith("ExitCode=")), None)


def parse_jobs(said: str) -> list[Job]:
    found = []
    for line in said.splitlines():
        number, name, state, restarts, reason, nodes, qos = line.split("|")[:7]
        if number.isdigit():  # not a job array of the same user
            found.append(
                Job(
                    id=int(number), name=name, state=state, reason=reason, nodes=nodes, restarts=int(restarts or 0),
                    qos=qos,
                )
            )  # fmt: skip
    return found


async def _call(command: list[str], *, stdin: str = "", variables: Mapping[str, str] | None = None) -> str:
    """Returns the command's output. SlurmSilent when Slurm does not answer, SlurmRefused when it says no."""
    given = dict(environment.child_environment() if variables is None else variables)
    try:
        with anyio.fail_after(_PATIENCE_S):
            done = await anyio.run_process(command, input=stdin.encode(), env=given, check=False)
    except TimeoutError as error:
        raise SlurmSilent(command=command[0], reason=f"no answer within {_PATIENCE_S:.0f} s") from error
    except FileNotFoundError as error:
        raise SlurmSilent(command=command[0], reason="the command is not on PATH") from error
    if done.returncode == 0:
        return done.stdout.decode().strip()
    reason = done.stderr.decode(errors="replace").strip()
    silent = any(words in reason.lower() for words in _SILENT)
    raise (SlurmSilent if silent else SlurmRefused)(command=command[0], reason=reason)
