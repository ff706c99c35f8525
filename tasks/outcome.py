"""Ends a run that Serin itself has ended as Failed with one sentence, and no traceback in its log.

A rollback, a failed gate, a lost comparison with the live version or a wrong spec is an outcome (`error.outcome`): its
message says everything. Prefect would log the exception with its traceback in every task and flow that it passes. Every
other error keeps its traceback.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from prefect.states import Failed

from serin.errors import SerinError

P = ParamSpec("P")
R = TypeVar("R")

_LOGGERS = (
    "prefect.flow_runs",
    "prefect.task_runs",
    "prefect.engine",
)  # of flows, tasks, and a run's process


def outcome_as_state(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Decorates the function of a flow, below `@flow`. Callers of the flow get the error as if it had been raised."""

    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_worth_logging)  # once, however often it is added
        try:
            return await function(*args, **kwargs)
        except SerinError as error:
            if not error.outcome:
                raise
            return cast("R", Failed(message=str(error), data=error))

    # Prefect builds a model of the parameters and would look up the names of their types in this module.
    run.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    return run


def _worth_logging(record: logging.LogRecord) -> bool:
    """Drops an exception that is an outcome: the state, which Prefect logs right after it, says the same in a line."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, SerinError) and error.outcome)
