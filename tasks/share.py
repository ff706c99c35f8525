"""Gives the result of a stage's run to the host that asked for it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from prefect.runtime import flow_run

from serin.machine import environment
from serin.store.stage_keys import notes
from serin.store.stage_results import share_outcome

P = ParamSpec("P")
R = TypeVar("R")


def shared_with_other_hosts(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Decorates the function of a stage's flow, below `@outcome_as_state`."""

    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        value = await function(*args, **kwargs)
        name = str(flow_run.id)
        await asyncio.to_thread(share_outcome, name, value, notes(environment.home(), name))
        return value

    run.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    return run
