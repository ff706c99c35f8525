"""Looks whether the tables of served models have changed; scheduled every five minutes."""

from __future__ import annotations

from prefect import flow

from tasks.outcome import outcome_as_state
from tasks.versions import live_models
from tasks.watch import look_at_tables


@flow(persist_result=True, result_serializer="json")
@outcome_as_state
async def watch() -> None:
    """Emits an event for each live model with `monitoring.retrain: [data]` whose tables have changed."""
    for model in live_models():
        await look_at_tables(model)
