"""Settles runs whose process is gone, once and on request. The stack's own reconciler does so all the time."""

from __future__ import annotations

from prefect import flow

from tasks.outcome import outcome_as_state
from tasks.reconcile import settle_runs


@flow(persist_result=True, result_serializer="json")
@outcome_as_state
async def reconcile() -> list[str]:
    """Returns what was found and done about runs of this machine's stack whose process is gone."""
    return await settle_runs()
