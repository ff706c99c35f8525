"""Ends a run that raised a SerinError as Failed with its message, and reduces Prefect's lines about an end to one.

Serin raises its errors on purpose, and their messages say what happened and what to do: a rollback, a refusal, a table
that does not fit. Prefect would log such an error with its traceback in every task and flow that it passes, and then a
state of its own wording. Unexpected errors keep their traceback, and with PREFECT_LOGGING_LEVEL=DEBUG Prefect's lines
stay as they are.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import re
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from prefect.exceptions import Pause
from prefect.states import Failed

from serin import errors
from serin.errors import SerinError
from serin.machine import environment
from serin.prefect.follow import ASKED_TO_STOP, last_line

P = ParamSpec("P")
R = TypeVar("R")

_FLOWS, _TASKS, _ENGINE = "prefect.flow_runs", "prefect.task_runs", "prefect.engine"
_FINISHED = re.compile(
    r"Finished in state (?P<state>\w+)\((?P<message>'.*'|\".*\")?(?:, )?(?:type=\w+)?\)", re.DOTALL
)
_STOPPED = "Execution was cancelled by the runtime environment"
_RAISED = re.compile(r"Task run encountered an exception:? (?P<kind>\w+)")


def outcome_as_state(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Decorates the function of a flow, below `@flow`. Callers of the flow get the error as if it had been raised."""

    @wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in (_FLOWS, _TASKS, _ENGINE):
            logging.getLogger(name).addFilter(_shorten)  # once, however often it is added
        try:
            return await function(*args, **kwargs)
        except SerinError as error:
            return cast("R", Failed(message=str(error), data=error))
        except asyncio.CancelledError as error:
            if environment.text("SERIN_SCHEDULER") is None:
                raise
            # The scheduler may start the run again. Prefect leaves the state of a run alone that raises this.
            raise Pause(f"{environment.text('SERIN_SCHEDULER')} decides the outcome of the run") from error

    # Prefect builds a model of the parameters and would look up the names of their types in this module.
    run.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    return run


def _shorten(record: logging.LogRecord) -> bool:
    """Rewrites Prefect's lines about an end; False leaves one out."""
    if logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        return True
    if record.exc_info and isinstance(record.exc_info[1], SerinError):
        return False  # the run's last line has its message
    if isinstance(record.args, tuple) and len(record.args) == 5 and isinstance(record.args[1], SerinError):
        record.msg, record.args = "%s; trying again %s", (record.args[1], record.args[4])
        return True
    if record.getMessage().startswith(f"Crash detected! {_STOPPED}"):
        return False  # cancelled or preempted, which is not a crash
    finished = _FINISHED.fullmatch(record.getMessage())
    if finished is None:
        return True
    state, message = finished["state"], str(ast.literal_eval(finished["message"] or "''"))
    if record.name == _TASKS:
        return state != "Completed" and not _names_serin_error(message)
    record.msg, record.args = ASKED_TO_STOP if message.startswith(_STOPPED) else last_line(state, message), ()
    return True


def _names_serin_error(message: str) -> bool:
    raised = _RAISED.match(message)
    kind = getattr(errors, raised["kind"], None) if raised else None
    return isinstance(kind, type) and issubclass(kind, SerinError)
