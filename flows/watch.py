"""Checks the promises of served models; scheduled every five minutes."""

from __future__ import annotations

from prefect import flow

from tasks.outcome import outcome_as_state
from tasks.versions import live_models
from tasks.watch import look_at_tables, watch_model


@flow(persist_result=True, result_serializer="json")
@outcome_as_state
async def watch(window_s: float = 300.0) -> list[str]:
    """Reports the promises that live models broke in the last `window_s` seconds: a page for each model, an event for
    each.

    Models with `monitoring.retrain: [data]` also get an event when their tables have changed.
    """
    models = live_models()
    for model in models:
        await look_at_tables(model)
    return [broken for model in models for broken in await watch_model(model, window_s)]
