"""Prefect's worker type `serin`: `prefect worker start --type serin --pool cpu`.

Each run gets a process that is forked from one that has its imports done (standby.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from uuid import UUID

import anyio
from anyio.abc import TaskStatus
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import InfrastructureNotAvailable
from prefect.states import Cancelled
from prefect.utilities.processutils import sanitize_subprocess_env
from prefect.workers.base import BaseJobConfiguration, BaseVariables, BaseWorker, BaseWorkerResult

from serin.machine import environment
from serin.prefect.processes import WORKER_TYPE

from .listening import Listening  # relative: the entry point loads this package under another name
from .standby import RunProcess, Standby, end_group

_CANCEL_S = 30.0  # a cancelled run may clean up for this long
_STOP_S = 15.0  # a run whose worker is stopped may save its work for this long


class RunResult(BaseWorkerResult):
    """How the process of a run ended."""


class WarmProcessWorker(Listening, BaseWorker[BaseJobConfiguration, BaseVariables, RunResult]):
    """Runs each flow run in a fork of a process that has imported Prefect and the flows."""

    type = WORKER_TYPE
    _description = (
        "Execute flow runs in forks of a process that has imported everything before the run arrives."
    )

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._standby = Standby()
        self._running: dict[UUID, RunProcess] = {}
        self._cancelled: set[UUID] = set()

    async def setup(self) -> None:
        await super().setup()
        await self._standby.prepare()

    async def teardown(self, *exc_info: Any) -> None:
        try:
            await super().teardown(*exc_info)
        finally:  # last: it reports how the runs end that the worker stops
            with anyio.CancelScope(shield=True):
                await self._standby.dismiss()

    async def run(
        self,
        flow_run: FlowRun,
        configuration: BaseJobConfiguration,
        task_status: TaskStatus[int] | None = None,
    ) -> RunResult:
        """Runs a flow run; returns when its process has ended. If the worker is stopped before, so is the process."""
        variables = sanitize_subprocess_env({**environment.child_environment(), **configuration.env})
        process = await self._standby.take(str(flow_run.id), variables)
        self._running[flow_run.id] = process
        try:
            if task_status is not None:
                task_status.started(process.pid)
            await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    await end_group(process.pid, grace_s=_STOP_S)
                await process.aclose()
            del self._running[flow_run.id]
        code = await self._settle(flow_run.id, process.returncode or 0)
        self.a_run_has_ended()
        return RunResult(identifier=str(process.pid), status_code=code)

    async def _settle(self, run: UUID, code: int) -> int:
        """Returns the exit code to report: 0 if the run's state already says how it ended, or that it is queued
        again."""
        cancelled = run in self._cancelled
        self._cancelled.discard(run)
        if not cancelled and code == 0:
            return 0
        state = (await self.client.read_flow_run(run)).state
        if state is None:
            return code
        if cancelled and (state.is_cancelling() or state.is_crashed()):
            await self.client.set_flow_run_state(
                run, Cancelled(message="Flow run was cancelled."), force=True
            )
            return 0
        return 0 if state.is_final() or state.is_scheduled() else code

    async def kill_infrastructure(
        self,
        infrastructure_pid: str,
        configuration: BaseJobConfiguration,  # noqa: ARG002 (Prefect's signature)
        grace_seconds: int = 30,  # noqa: ARG002
    ) -> None:
        """Ends a run that is cancelled before it has begun; called by Prefect."""
        for run, process in list(self._running.items()):
            if str(process.pid) == infrastructure_pid:
                await self.cancel(run)
                return
        raise InfrastructureNotAvailable(f"process {infrastructure_pid} was not started by this worker")

    def runs_here(self) -> Collection[UUID]:
        return self._running

    async def cancel(self, run: UUID) -> None:
        process = self._running.get(run)
        if process is not None and run not in self._cancelled:
            self._cancelled.add(run)
            await end_group(process.pid, grace_s=_CANCEL_S)

    async def end(self, run: UUID) -> None:
        process = self._running.get(run)
        if process is not None:
            await end_group(process.pid, grace_s=_STOP_S)
