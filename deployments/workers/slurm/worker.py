"""Prefect's worker type `serin-slurm`: `prefect worker start --type serin-slurm --pool gpu`, where sbatch works.

Each run becomes a batch job named by the run's id. The job outlives the worker: one that is started again finds its
jobs by their names, follows them and submits nothing twice. What a job does on its node: serin.prefect.slurm_job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from anyio.abc import TaskStatus
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, WorkerStatus
from prefect.exceptions import InfrastructureNotFound, ObjectNotFound
from prefect.states import AwaitingRetry, Cancelled, Crashed, Pending
from prefect.workers.base import BaseVariables, BaseWorker, BaseWorkerResult

from serin.errors import SlurmRefused, SlurmSilent
from serin.machine import environment
from serin.prefect.processes import SLURM_TYPE

# relative: the entry point loads this package under another name
from ..listening import Listening  # noqa: TID252
from .commands import Slurm
from .configuration import SlurmConfiguration
from .job_states import Fate, Job, fate_of, newest

_POLL_S = 2.0
_PATIENCE_S, _AGAIN_S = 600.0, 10.0  # with a controller that is being restarted
_MISSES = 3  # looks without the job before it counts as gone
_UNSUBMITTED_S = 20.0  # a run that a worker took may wait this long for its job
_UNDER_WAY = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
_WORKER_LABEL = "prefect.worker.name"
_NO_QOS = (
    " {!r}, which `priority` of the spec or the pool asks for; an administrator makes it with `sacctmgr add qos` and "
    "lets your account have it, as docs/how-to/orchestrate.md shows"
)
_TAIL = 4000  # characters of a job's output


class JobResult(BaseWorkerResult):
    """How the job of a run ended. Its code is 0: the worker has set the run's state."""


class SlurmWorker(Listening, BaseWorker[SlurmConfiguration, BaseVariables, JobResult]):
    """Runs each flow run as a Slurm batch job."""

    type = SLURM_TYPE
    job_configuration = SlurmConfiguration
    _description = (
        "Execute flow runs as Slurm batch jobs, which are requeued and resumed at their time limit."
    )

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._slurm = Slurm()
        self._followed: dict[UUID, int] = {}
        self._given_up: set[UUID] = set()
        self._unsubmitted: dict[UUID, float] = {}

    async def run(
        self,
        flow_run: FlowRun,
        configuration: SlurmConfiguration,
        task_status: TaskStatus[int] | None = None,
    ) -> JobResult:
        """Submits the job of a run and follows it to its end. The job continues when this worker is stopped."""
        number = await self._find_or_submit(flow_run, configuration)
        if task_status is not None:
            task_status.started(number)
        await self._follow(flow_run, number)
        return JobResult(identifier=str(number), status_code=0)

    async def _find_or_submit(self, flow_run: FlowRun, configuration: SlurmConfiguration) -> int:
        """Returns the job of a run. A controller that does not answer may still have taken a job: look before."""
        log, patience = self.get_flow_run_logger(flow_run), _PATIENCE_S
        while True:
            try:
                named = [job for job in await self._slurm.jobs() if job.name == str(flow_run.id)]
                known = newest(job for job in named if not job.ended)
                if known is not None:
                    log.info("its job was submitted before: %s", known)
                    return known.id
                number = await self._submit(flow_run, configuration)
                log.info("Slurm job %d submitted", number)
                await self._say_without_qos(flow_run, number, configuration.qos)
                return number
            except SlurmSilent as error:
                if patience <= 0:
                    raise
                log.warning("%s; trying again", error)
                patience -= _AGAIN_S
                await asyncio.sleep(_AGAIN_S)

    async def _submit(self, flow_run: FlowRun, configuration: SlurmConfiguration) -> int:
        home = environment.home()
        logs = home / "logs" / "slurm"
        logs.mkdir(parents=True, exist_ok=True)
        logs.chmod(0o700)
        flow = (await self.client.read_flow(flow_run.flow_id)).name
        try:
            return await self._slurm.submit(
                configuration.sbatch_options(run=str(flow_run.id), flow=flow, home=home),
                configuration.script(),
                configuration.job_environment(environment.child_environment(), home=home),
            )
        except SlurmRefused as refusal:
            reason = str(refusal.fields["reason"])
            if configuration.qos is None or "qos" not in reason.lower():
                raise
            raise SlurmRefused(
                command="sbatch", reason=f"{reason}{_NO_QOS.format(configuration.qos)}"
            ) from refusal

    async def _say_without_qos(self, flow_run: FlowRun, number: int, wanted: str | None) -> None:
        """Slurm without an accounting database accepts every quality of service, and has none."""
        if wanted is None:
            return
        job = next((job for job in await self._slurm.jobs() if job.id == number), None)
        if job is not None and job.qos != wanted:
            self.get_flow_run_logger(flow_run).warning(
                "Slurm has accepted job %d without its quality of service %s: this cluster has no accounting database, "
                "and its jobs are queued in the order of their arrival",
                number,
                wanted,
            )

    async def _follow(self, flow_run: FlowRun, number: int) -> None:
        """Logs what Slurm does with the job, until it has ended; then gives the run its final state."""
        if flow_run.id in self._followed:
            return
        self._followed[flow_run.id] = number
        try:
            state = (await self.client.read_flow_run(flow_run.id)).state
            if state is not None and (state.is_final() or state.is_cancelling()):  # while it was submitted
                await self._slurm.cancel(number)
            job = await self._until_ended(flow_run, number)
            await self._settle(flow_run, number, job)
        finally:
            del self._followed[flow_run.id]

    async def _until_ended(self, flow_run: FlowRun, number: int) -> Job | None:
        """Returns the job as it ended; None when Slurm does not know it any more."""
        log, said, misses, shown = self.get_flow_run_logger(flow_run), "", 0, 0
        while misses < _MISSES:
            try:
                job = next((job for job in await self._slurm.jobs() if job.id == number), None)
            except (SlurmSilent, SlurmRefused) as error:
                job, line = None, str(error)  # no answer says nothing about the job
            else:
                misses = misses + 1 if job is None else 0
                line = str(job) if job is not None else said
            if line != said:
                log.info("%s", line)
                said = line
            if job is not None and job.ended:
                return job
            if job is not None and job.waits and job.restarts > shown:
                shown = job.restarts
                await self._waits_again(flow_run.id, job)
            await asyncio.sleep(_POLL_S)
        return None

    async def _waits_again(self, run: UUID, job: Job) -> None:
        """Shows that the run waits: without a process it sends no sign of life, and would count as lost."""
        state = (await self.client.read_flow_run(run)).state
        if state is not None and state.is_running():
            await self.client.set_flow_run_state(run, Pending(message=str(job)), force=True)

    async def _settle(self, flow_run: FlowRun, number: int, job: Job | None) -> None:
        state = (await self.client.read_flow_run(flow_run.id)).state
        given_up = flow_run.id in self._given_up
        self._given_up.discard(flow_run.id)
        fate = fate_of(job, state.type.value if state is not None else "")
        if fate is Fate.LEAVE or given_up:
            return
        why = str(job) if job is not None else f"Slurm does not know job {number} any more"
        code = await self._exit_code(number)
        if code not in (None, "0:0"):
            why = f"{why} (exit code {code})"
        log = self.get_flow_run_logger(flow_run)
        if fate is Fate.CRASHED and (tail := _output(environment.home(), flow_run.id, number)):
            log.warning("the last lines of its output:\n%s", tail)
        made: State[Any] = Cancelled(message=why) if fate is Fate.CANCELLED else Crashed(message=why)
        await self.client.set_flow_run_state(flow_run.id, made, force=True)
        log.info("the run ended as %s: %s", made.name, why)

    async def _exit_code(self, number: int) -> str | None:
        try:
            return await self._slurm.exit_code(number)
        except SlurmSilent:
            return None

    def runs_here(self) -> Collection[UUID]:
        return self._followed

    def runs_on_this_host(self) -> Collection[UUID]:
        return ()  # their jobs continue without it

    async def end(self, run: UUID) -> None:
        self._given_up.add(run)
        await self.cancel(run)

    async def cancel(self, run: UUID) -> None:
        number = self._followed.get(run)
        if number is not None:
            await self._slurm.cancel(number)

    async def kill_infrastructure(
        self,
        infrastructure_pid: str,
        configuration: SlurmConfiguration,  # noqa: ARG002 (Prefect's signature)
        grace_seconds: int = 30,  # noqa: ARG002
    ) -> None:
        """Ends the job of a run that is cancelled before it has begun; called by Prefect."""
        number = infrastructure_pid.partition(".")[0]
        if not number.isdigit():
            raise InfrastructureNotFound(f"{infrastructure_pid!r} is not a Slurm job")
        await self._slurm.cancel(int(number))

    async def sync_with_backend(self) -> None:
        """Adopts the jobs of runs that nobody follows: those of an earlier worker of this pool."""
        await super().sync_with_backend()
        try:
            await self._adopt()
        except (SlurmSilent, SlurmRefused) as error:
            self._logger.warning("%s", error)

    async def _adopt(self) -> None:
        jobs = await self._slurm.jobs()
        elsewhere = await self._other_workers()
        pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[self._work_pool_name]))
        wanted = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_UNDER_WAY)))
        runs = await self.client.read_flow_runs(flow_run_filter=wanted, work_pool_filter=pool)
        waiting: dict[UUID, float] = {}
        for run in runs:
            taken_by = str((run.labels or {}).get(_WORKER_LABEL, ""))
            if run.id in self._followed or run.id in self._submitting_flow_run_ids or taken_by in elsewhere:
                continue
            job = newest(job for job in jobs if job.name == str(run.id))
            if job is not None:
                self.in_background(self._take_over(run, job))
            else:
                waiting[run.id] = self._unsubmitted.get(run.id, asyncio.get_running_loop().time())
                if asyncio.get_running_loop().time() - waiting[run.id] >= _UNSUBMITTED_S:
                    await self._without_job(run)
        self._unsubmitted = waiting
        if waiting:
            self.in_background(self._look_again())

    async def _look_again(self) -> None:
        await asyncio.sleep(_UNSUBMITTED_S / 2)
        await self.sync_with_backend()

    async def _take_over(self, run: FlowRun, job: Job) -> None:
        self.get_flow_run_logger(run).info("worker %s follows it now: %s", self.name, job)
        if run.state is not None and run.state.is_cancelling() and not job.ended:
            await self._slurm.cancel(job.id)
        await self._follow(run, job.id)

    async def _without_job(self, run: FlowRun) -> None:
        """A run without a job: it was taken by a worker that ended before sbatch, or Slurm has forgotten its job."""
        state = (await self.client.read_flow_run(run.id)).state
        if state is None or state.type not in _UNDER_WAY:
            return
        made: State[Any]
        if state.is_pending():
            made = AwaitingRetry(
                message="the worker that took it has submitted no job", scheduled_time=datetime.now(UTC)
            )
        elif state.is_cancelling():
            made = Cancelled(message="it had no Slurm job any more")
        else:
            made = Crashed(message="Slurm does not know its job any more")
        await self.client.set_flow_run_state(run.id, made, force=True)
        self.get_flow_run_logger(run).info("%s: %s", made.name, made.message)

    async def _other_workers(self) -> set[str]:
        """Returns the names of other live workers of this pool, which follow their runs themselves."""
        try:
            workers = await self.client.read_workers_for_work_pool(self._work_pool_name)
        except (ObjectNotFound, httpx.HTTPError):
            return set()
        return {each.name for each in workers if each.status == WorkerStatus.ONLINE} - {self.name}


def _output(home: Path, run: UUID, number: int) -> str:
    """Returns the end of what a job printed; nothing where this machine does not see its file."""
    try:
        text = (home / "logs" / "slurm" / f"{run}-{number}.log").read_text(errors="replace")
    except OSError:
        return ""
    return text[-_TAIL:].strip()
