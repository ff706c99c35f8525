"""Prefect's task that refreshes the lookups of a live model, and which models are due."""

from __future__ import annotations

import time

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run

from serin.machine import environment
from serin.pipeline import lookups as use_case
from serin.store.artifacts import Release
from serin.store.store import Store
from tasks.in_thread import in_thread
from tasks.retry import error_is_retryable
from tasks.versions import live_models


def models_to_refresh(model: str | None) -> list[str]:
    """Returns the model that is named, or every live one with a lookup that has reached half of its `max_age`."""
    if model is not None:
        return [model]
    store, now = Store.open(), time.time()
    due = [name for name in live_models() if use_case.is_due(store, use_case.live_release(store, name), now)]
    get_run_logger().info("lookups to refresh: %s", ", ".join(due) or "none")
    return due


@task(
    task_run_name="refresh_lookups {model}",
    retries=3,
    retry_delay_seconds=2,
    retry_condition_fn=error_is_retryable,
    cache_policy=NO_CACHE,
)
async def refresh_lookups(model: str, canary: bool) -> Release:
    """Returns the release that is live once the tables of the model's lookups were read again."""
    who = f"{environment.actor()} (flow run {flow_run.name})"
    found = await in_thread(use_case.refresh_lookups, model, canary=canary, again=False, by=who)
    get_run_logger().info("%s: %s", found.value.name, found.why)
    return found.value
