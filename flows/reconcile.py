"""Every run has a process, or an end. The stack's own reconciler looks all the time; this looks once, on demand."""

from __future__ import annotations

from prefect import flow

from tasks.outcome import outcome_as_state
from tasks.reconcile import settle_runs


@flow(persist_result=True, result_serializer="json")
@outcome_as_state
async def reconcile() -> list[str]:
    """What was found and done about runs of this machine's stack whose process is gone."""
    return await settle_runs()
