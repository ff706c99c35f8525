"""Prefect's worker type `serin`: `prefect worker start --type serin --pool cpu`.

It hands each run to a process that has its imports done and waits (standby.py). It subscribes to the server's events,
so that a run starts when it is requested and not at the next poll; polling remains for missed events.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from uuid import UUID

import anyio
import httpx
from anyio.abc import Process, TaskStatus
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventNameFilter
from prefect.exceptions import InfrastructureNotAvailable
from prefect.states import Cancelled
from prefect.utilities.processutils import sanitize_subprocess_env
from prefect.workers.base import BaseJobConfiguration, BaseVariables, BaseWorker, BaseWorkerResult
from websockets.exceptions import WebSocketException

from serin.machine import environment
from serin.stack.prefect.processes import WORKER_TYPE

from .standby import Standby, end_group  # relative: the entry point loads this package under another name

_RUN = "prefect.flow-run."
_WAITS = tuple(f"{_RUN}{state}" for state in ("Scheduled", "AwaitingRetry", "Resuming"))
_CANCELLING = f"{_RUN}Cancelling"
_PAUSES_S = (0.0, 0.1, 0.4)
_RECONNECT_S = 5.0
_CANCEL_S = 30.0  # a cancelled run may clean up for this long
_STOP_S = 15.0  # a run whose worker is stopped may save its work for this long


class RunResult(BaseWorkerResult):
    """How the process of a run ended."""


class WarmProcessWorker(BaseWorker[BaseJobConfiguration, BaseVariables, RunResult]):
    """Runs each flow run in a process that has already imported Prefect and the flows."""

    type = WORKER_TYPE
    _description = (
        "Execute flow runs in processes that are started and import everything before the run arrives."
    )

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._standby = Standby()
        self._running: dict[UUID, Process] = {}
        self._cancelled: set[UUID] = set()
        self._asking = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listens = False

    async def setup(self) -> None:
        await super().setup()
        await self._standby.prepare()

    async def teardown(self, *exc_info: Any) -> None:
        for task in self._tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await self._standby.dismiss()
        await super().teardown(*exc_info)

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
                await self._cancel(run)
                return
        raise InfrastructureNotAvailable(f"process {infrastructure_pid} was not started by this worker")

    async def _cancel(self, run: UUID) -> None:
        process = self._running.get(run)
        if process is not None and run not in self._cancelled:
            self._cancelled.add(run)
            await end_group(process.pid, grace_s=_CANCEL_S)

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        async with self._asking:  # two calls at the same time would take a run twice
            return await super().get_and_submit_flow_runs()

    async def sync_with_backend(self) -> None:
        """Subscribes to events once the pool is known, and looks for cancelled runs whose event was missed."""
        await super().sync_with_backend()
        if not self._listens:
            self._listens = True
            self._in_background(self._listen())
        await self._cancel_missed()

    async def _cancel_missed(self) -> None:
        if not self._running:
            return
        cancelling = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CANCELLING]))
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=list(self._running)), state=cancelling)
        for run in await self.client.read_flow_runs(flow_run_filter=wanted):
            self._in_background(self._cancel(run.id))

    async def _listen(self) -> None:
        """Reacts to the server's events. Where the server sends none, polling finds the same runs later."""
        pool = EventAnyResourceFilter(id=[f"prefect.work-pool.{self.work_pool.id}"])
        wanted = EventFilter(event=EventNameFilter(name=[*_WAITS, _CANCELLING]), any_resource=pool)
        while True:
            with contextlib.suppress(
                OSError, WebSocketException, httpx.HTTPError
            ):  # the server is being restarted
                async with get_events_subscriber(filter=wanted) as events:
                    await self._cancel_missed()
                    async for event in events:
                        if event.event == _CANCELLING:
                            self._in_background(self._cancel(UUID(event.resource.id.removeprefix(_RUN))))
                        else:
                            await self._ask()
            await asyncio.sleep(_RECONNECT_S)

    async def _ask(self) -> None:
        for pause_s in _PAUSES_S:  # an event may arrive before the database shows the run
            await asyncio.sleep(pause_s)
            with contextlib.suppress(httpx.HTTPError):
                if await self.get_and_submit_flow_runs():
                    return

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
