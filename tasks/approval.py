"""The approval form that Prefect shows when a rollout waits for a person, and how long it is shown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import httpx
from prefect.exceptions import PrefectException
from prefect.flow_runs import aresume_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run

from serin.rollout.decide.state import Hold
from serin.rollout.run.access import find_rollouts
from serin.rollout.run.status import status_of
from serin.store.artifacts import Release


class Approval(RunInput):
    approve: bool = True  # False rolls back and ends the rollout
    why: str = ""  # for the journal


@asynccontextmanager
async def until_answered_elsewhere(
    release: Release, rollout: str, *, every_s: float = 2.0
) -> AsyncIterator[asyncio.Event]:
    """Ends the pause of a run once the rollout no longer waits for this approval.

    That is when somebody has used `serin rollout approve`, or the candidate failed in the meantime. The event reports
    it, and no answer must be given then.
    """
    elsewhere = asyncio.Event()
    watching = asyncio.create_task(_watch(UUID(flow_run.id), release, rollout, every_s, elsewhere))
    try:
        yield elsewhere
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def _watch(run: UUID, release: Release, rollout: str, every_s: float, elsewhere: asyncio.Event) -> None:
    asked = _waits_at(release, rollout)
    while True:
        await asyncio.sleep(every_s)
        if asked is not None and _waits_at(release, rollout) == asked:
            continue
        elsewhere.set()  # first: the run may resume, and end this, before the next call returns
        try:
            await aresume_flow_run(run, run_input={"approve": True, "why": "answered elsewhere"})
        except (PrefectException, RuntimeError, httpx.HTTPError):
            elsewhere.clear()  # Prefect has not stored the form yet, or a person has just filled it in
        else:
            return


def _waits_at(release: Release, rollout: str) -> int | None:
    """Returns the step at whose end the rollout waits for approval; -1 before the first; None: it does not wait."""
    status = status_of(find_rollouts(), release.model)
    if status is None or status.rollout.id != rollout or status.rollout.hold != Hold.APPROVAL:
        return None
    return -1 if status.rollout.step is None else status.rollout.step
