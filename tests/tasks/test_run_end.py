"""The end of a run, as the events of a real server report it. The test sets the states, no worker does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any
from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, Running, State

from tasks.run_end import RunEnd, listening_for_end

LONG_S, SHORT_S = 600.0, 0.01
BOUND_S = 60.0  # shorter than LONG_S: a wait that only a timeout ends fails


@flow
async def stage() -> None: ...


def within_bound(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await work

    asyncio.run(bounded())


async def begin() -> UUID:
    async with get_client() as client:
        return UUID(str((await client.create_flow_run(stage, state=Running())).id))


async def set_state(run: UUID, state: State[Any]) -> None:
    async with get_client() as client:
        await client.set_flow_run_state(run, state, force=True)


async def news(end: RunEnd) -> bool:
    return await end.wait(asking_s=LONG_S, listening_s=LONG_S)


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize(
    "last", [Completed(), Failed(), Crashed(), Cancelled()], ids=lambda state: state.name
)
def test_the_end_of_a_run_wakes_who_waits_for_it(last: State[Any]) -> None:
    async def wait() -> None:
        run = await begin()
        async with listening_for_end(run) as end:
            assert await news(end), "the connection itself is news"
            await set_state(run, last)
            assert await news(end)

    within_bound(wait())


@pytest.mark.usefixtures("prefect_server")
def test_the_end_of_another_run_wakes_nobody() -> None:
    async def wait() -> None:
        run, other = await begin(), await begin()
        async with listening_for_end(run) as end, listening_for_end(other) as other_end:
            assert await news(end)
            assert await news(other_end)
            await set_state(other, Completed())
            assert await news(other_end), "the event was sent"
            assert not await end.wait(asking_s=SHORT_S, listening_s=SHORT_S)

    within_bound(wait())


def test_without_a_server_the_wait_is_a_pause_until_the_next_question() -> None:
    async def wait() -> None:
        async with listening_for_end(UUID(int=1)) as end:
            assert not await end.wait(asking_s=SHORT_S, listening_s=LONG_S)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens there
        with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{bound.getsockname()[1]}/api"}):
            within_bound(wait())
