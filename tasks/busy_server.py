"""A client of Prefect for requests that a busy server may refuse for a moment.

A server on SQLite refuses a write that meets another one, and would accept it milliseconds later. Without the header
`Retry-After`, Prefect's client waits two seconds, then four. Here such an answer gets that header.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.exceptions import PrefectHTTPStatusError

Result = TypeVar("Result")

_FIRST_S, _GROWS = 0.05, 4
_AGAIN_S = (0.1, 1.0)
_REFUSALS = "serin.refusals"  # of a request so far, among httpx's extensions


def client_that_repeats_soon() -> PrefectClient:
    """Returns a client that repeats a refused request after 0.05 s, 0.2 s and so on, as often as every client does."""
    return get_client(httpx_settings={"event_hooks": {"response": [repeat_soon]}})


async def repeat_soon(response: httpx.Response) -> None:
    if response.status_code != httpx.codes.SERVICE_UNAVAILABLE or "Retry-After" in response.headers:
        return
    extensions = response.request.extensions
    refusals = extensions[_REFUSALS] = extensions.get(_REFUSALS, 0) + 1
    response.headers["Retry-After"] = str(_FIRST_S * _GROWS ** (refusals - 1))


async def repeat_while_busy(ask: Callable[[], Awaitable[Result]], *, within_s: float) -> Result:
    """Repeats what the server refuses more often than its client repeats a request. `ask` must be idempotent."""
    end = time.monotonic() + within_s
    while True:
        try:
            return await ask()
        except PrefectHTTPStatusError as error:
            if error.response.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > end:
                raise
        await asyncio.sleep(random.uniform(*_AGAIN_S))
