"""What Serin's worker types share: a worker that hears of runs and of their cancelling from the server's events, and
reports itself to the store that hosts share.

A run starts when it is requested and not at the next poll. Polling remains for events that were missed.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING, Any
from uuid import UUID

import anyio
import httpx
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventAnyResourceFilter, EventFilter, EventNameFilter
from websockets.exceptions import WebSocketException

from serin.cluster.host_worker import Reports
from serin.host.standing import begin_beats
from serin.machine import environment
from serin.machine.heartbeat import beat

from .asking import Asking  # relative: the entry point loads this package under another name

if TYPE_CHECKING:
    from prefect.workers.base import BaseWorker

    _Worker = BaseWorker[Any, Any, Any]
else:
    _Worker = object  # Prefect registers every subclass of its worker as a type

_RUN = "prefect.flow-run."
_WAITS = tuple(f"{_RUN}{state}" for state in ("Scheduled", "AwaitingRetry", "Resuming"))
_CANCELLING = f"{_RUN}Cancelling"
_RECONNECT_S = 5.0
_REPORT_S = 1.0
_WAITS_S = 30.0  # that code of Prefect may block the loop


class Listening(_Worker):
    """A base of worker types, before Prefect's worker. They say which runs they have (`runs_here`) and how one is
    cancelled (`cancel`)."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._taking = asyncio.Lock()
        self._asking = Asking(self._take)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listens = False
        self._reports = Reports(self._work_pool_name)

    @abstractmethod
    def runs_here(self) -> Collection[UUID]:
        """Returns the runs that this worker follows now."""

    def runs_on_this_host(self) -> Collection[UUID]:
        """Returns the runs that end when this host is lost."""
        return self.runs_here()

    @abstractmethod
    async def cancel(self, run: UUID) -> None:
        """Ends a run that is being cancelled, if it is here."""

    async def end(self, run: UUID) -> None:
        """Ends a run that was given up elsewhere, if it is here."""
        await self.cancel(run)

    async def teardown(self, *exc_info: Any) -> None:
        for task in self._tasks:
            task.cancel()
        if self._reports.wanted:
            with anyio.CancelScope(shield=True):
                await asyncio.to_thread(self._reports.leave)
        await super().teardown(*exc_info)

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        async with self._taking:  # two calls at the same time would take a run twice
            return await super().get_and_submit_flow_runs()

    async def sync_with_backend(self) -> None:
        """Subscribes to events once the pool is known, and looks for cancelled runs whose event was missed."""
        await super().sync_with_backend()
        if not self._listens:
            self._listens = True
            begin_beats(environment.home(), waits_s=_WAITS_S)
            self.in_background(self._beat())
            self.in_background(self._listen())
            self.in_background(self._asking.run())
            if self._reports.wanted:
                self.in_background(self._report())
        await self._cancel_missed()

    async def _beat(self) -> None:
        """Proves that the worker's loop works."""
        while True:
            beat()
            await asyncio.sleep(_REPORT_S)

    async def _cancel_missed(self) -> None:
        """Ends runs that were cancelled, and those that were given up because this host could not be reached: another
        one may have taken their place."""
        here = list(self.runs_here())
        if not here:
            return
        over = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CANCELLING, StateType.CRASHED]))
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=here), state=over)
        for run in await self.client.read_flow_runs(flow_run_filter=wanted):
            crashed = run.state is not None and run.state.is_crashed()
            self.in_background(self.end(run.id) if crashed else self.cancel(run.id))

    async def _report(self) -> None:
        """Tells other hosts each second that this one is there, and which runs it has."""
        while True:
            await asyncio.to_thread(self._reports.report, [str(run) for run in self.runs_on_this_host()])
            await asyncio.sleep(_REPORT_S)

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
                    await self.get_and_submit_flow_runs()  # whose events were missed
                    async for event in events:
                        if event.event == _CANCELLING:
                            self.in_background(self.cancel(UUID(event.resource.id.removeprefix(_RUN))))
                        else:
                            self._asking.heard()
            await asyncio.sleep(_RECONNECT_S)

    def a_run_has_ended(self) -> None:
        """Asks for a run that has waited for a slot of the pool: no event reports that it can begin."""
        if self.work_pool.concurrency_limit is not None:
            self._asking.heard()

    async def _take(self) -> int:
        with contextlib.suppress(httpx.HTTPError):  # a busy server is asked again
            return len(await self.get_and_submit_flow_runs())
        return 0

    def in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
