"""Runs a use case of Serin in a thread of this task: its log is the run's log, and a cancelled run stops it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from tasks.run_log import run_log

Result = TypeVar("Result")


async def in_thread(use_case: Callable[..., Result], *given: Any, **named: Any) -> Result:
    """Returns the result of `use_case`, which takes an event `stop` that is set when this run is cancelled."""
    stop = threading.Event()
    try:
        with run_log():
            return await asyncio.to_thread(use_case, *given, **named, stop=stop)
    finally:
        stop.set()  # no effect after the end of the use case
