"""How the served models do: scheduled every five minutes."""

from __future__ import annotations

from prefect import flow

from tasks.watch import live_models, watch_model


@flow(persist_result=True, result_serializer="json")
async def watch(window_s: float = 300.0) -> list[str]:
    """The promises that live models broke in the last `window_s` seconds: a page for each model, an event for each."""
    return [broken for model in live_models() for broken in await watch_model(model, window_s)]
