"""Refreshes the lookups of live models: on a schedule, and when an event says that a table has changed."""

from __future__ import annotations

from prefect import flow

from serin.store.artifacts import Release
from tasks.lookups import models_to_refresh
from tasks.lookups import refresh_lookups as refresh_one
from tasks.outcome import outcome_as_state
from tasks.versions import all_tried


@flow(name="refresh_lookups", persist_result=True, result_serializer="json")
@outcome_as_state
async def refresh_lookups(model: str | None = None, canary: bool = False) -> list[Release]:
    """Reads the tables of a live model's lookups again and switches to an edition with them.

    Without a name: of all live models with a lookup that has reached half of its `lookup.max_age`. All are tried; the
    first error is raised at the end. `canary`: shift traffic by the steps of the spec instead of all at once.
    """
    names = models_to_refresh(model)
    return await all_tried(refresh_one(name, canary) for name in names)
