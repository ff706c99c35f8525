"""Asks for runs after an event said that there is one, until it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

_PAUSES_S = (0.0, 0.1, 0.4, 1.0, 2.0, 4.0)


class Asking:
    """Asks at once, and again after growing pauses, until as many runs were found as events were heard. An event is
    sent before the transaction that it reports is committed, and a busy server takes seconds for that. Some runs are
    never found here: they are due later, or another worker has taken them. `ask` returns how many it found.

    Events that arrive in the meantime start the pauses again; many at once cost no more requests than one.
    """

    def __init__(self, ask: Callable[[], Awaitable[int]], *, pauses_s: tuple[float, ...] = _PAUSES_S) -> None:
        self._ask, self._pauses_s = ask, pauses_s
        self._event = asyncio.Event()
        self._missing = 0

    def heard(self) -> None:
        """An event said that there is a run."""
        self._missing += 1
        self._event.set()

    async def run(self) -> None:
        """Asks after each event, until it is cancelled."""
        while True:
            await self._event.wait()
            self._event.clear()
            await self._ask_until_found()
            if not self._event.is_set():
                self._missing = 0

    async def _ask_until_found(self) -> None:
        for pause_s in self._pauses_s:
            if await self._heard_within(pause_s):
                return
            found = await self._ask()
            self._missing = max(self._missing - found, 0)  # read after the wait, in which events are heard
            if not self._missing:
                return

    async def _heard_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
