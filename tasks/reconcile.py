"""Finds and settles runs whose process is gone."""

from __future__ import annotations

import asyncio
import time

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from serin.host.state import running_stack
from serin.machine import environment
from serin.prefect.reconcile import STARTING_S, build_reconciler

_LOOK_S = 2.0


@task(task_run_name="settle_runs", cache_policy=NO_CACHE)
async def settle_runs() -> list[str]:
    """Checks until no process is missing any more; returns what was done, as messages."""
    reconciler, said = build_reconciler(running_stack(environment.home())), list[str]()
    deadline = time.monotonic() + STARTING_S + 30.0
    while True:
        found = await asyncio.to_thread(reconciler.look)
        for line in found:
            get_run_logger().info(line)
        said += found
        if not reconciler.waits or time.monotonic() > deadline:
            return said
        await asyncio.sleep(_LOOK_S)
