"""Refreshes the lookups of live models: on a schedule, and when an event says that a table has changed."""

from __future__ import annotations

import asyncio

from prefect import flow, get_run_logger

from serin.errors import SerinError
from serin.store.artifacts import Release
from tasks.lookups import models_to_refresh
from tasks.lookups import refresh_lookups as refresh_one
from tasks.outcome import outcome_as_state


@flow(name="refresh_lookups", persist_result=True, result_serializer="json")
@outcome_as_state
async def refresh_lookups(model: str | None = None, canary: bool = False) -> list[Release]:
    """Reads the tables of a live model's lookups again and switches to an edition with them.

    Without a name: of all live models with a lookup that has reached half of its `lookup.max_age`. All are tried; the
    first error is raised at the end. `canary`: shift traffic by the steps of the spec instead of all at once.
    """
    names = models_to_refresh(model)
    ended = await asyncio.gather(*(refresh_one(name, canary) for name in names), return_exceptions=True)
    errors = [end for end in ended if isinstance(end, BaseException)]
    for error in errors:
        if not isinstance(error, SerinError):
            raise error
        get_run_logger().error("%s", error)
    if errors:
        raise errors[0]
    return [end for end in ended if isinstance(end, Release)]
