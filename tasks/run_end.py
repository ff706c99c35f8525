"""Wakes a task that waits for the end of a run, when the server reports it as an event.

Asking the server instead takes its time from the run that is waited for. Who waits still asks, less often: an event may
be lost, and not every server sends them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

import httpx
from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from websockets.exceptions import WebSocketException

_RUN = "prefect.flow-run."
_ENDS = [f"{_RUN}{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut")]
_RECONNECT_S = 5.0


class RunEnd:
    """The end of one run, as the server's events report it."""

    def __init__(self, run: UUID) -> None:
        self._run = run
        self._news = asyncio.Event()
        self._connected = self._reported = False

    async def wait(self, *, asking_s: float, listening_s: float) -> bool:
        """Returns True when there is news about the run; False without any after `listening_s`, or after `asking_s`
        while there is no connection."""
        pause_s = listening_s if self._connected and not self._reported else asking_s
        try:
            async with asyncio.timeout(pause_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True

    async def listen(self) -> None:
        """Never returns. The connection itself is news: the run may have ended before."""
        wanted = EventFilter(
            event=EventNameFilter(name=_ENDS), resource=EventResourceFilter(id=[f"{_RUN}{self._run}"])
        )
        while True:
            try:
                async with get_events_subscriber(filter=wanted) as events:
                    self._connected = True
                    self._news.set()
                    async for _ in events:
                        self._reported = True  # an event may arrive before the database shows the state
                        self._news.set()
            except (OSError, WebSocketException, httpx.HTTPError):  # the server is being restarted
                pass
            finally:
                self._connected = False
            await asyncio.sleep(_RECONNECT_S)


@contextlib.asynccontextmanager
async def listening_for_end(run: UUID) -> AsyncIterator[RunEnd]:
    """Listens in the background. Without a connection, for whatever reason, `RunEnd.wait` is a pause."""
    end = RunEnd(run)
    listening = asyncio.create_task(end.listen())
    try:
        yield end
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
