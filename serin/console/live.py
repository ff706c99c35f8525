"""Live views: a stream of server-sent events with a view's HTML, each time it has changed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from serin.console.state import Console
from serin.console.views.view import View, view_parameters
from serin.errors import SerinError

log = logging.getLogger(__name__)

_MOST_STREAMS: Final = 200
_QUIET_S: Final = 15.0  # a comment is sent after this time, so that proxies keep the connection


class Live:
    """The streams of all views."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._streams = 0

    def handler(self, view: View) -> Callable[[Request], Awaitable[Response]]:
        async def stream(request: Request) -> Response:
            if self._console.session(request) is None:
                raise HTTPException(401, "log in first")
            if self._streams >= _MOST_STREAMS:
                raise HTTPException(503, "too many open pages")
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(
                self._events(view, request), media_type="text/event-stream", headers=headers
            )

        return stream

    async def _events(self, view: View, request: Request) -> AsyncIterator[str]:
        self._streams += 1
        try:
            sent, quiet_s = request.query_params.get("seen", ""), 0.0
            yield "retry: 3000\n\n"
            while not await request.is_disconnected():
                session = self._console.session(request)
                if session is None:
                    yield event("ended", "")
                    return
                try:
                    html = await run_in_threadpool(
                        self._console.fragment, view, view_parameters(view, request), may_act=session.may_act
                    )
                except (SerinError, OSError) as error:
                    log.warning("%s cannot be read: %s", view.path, error)
                else:
                    digest = fingerprint(html)
                    quiet_s += view.every_s
                    if digest != sent:
                        sent, quiet_s = digest, 0.0
                        yield event("view", html)
                if quiet_s >= _QUIET_S:
                    quiet_s = 0.0
                    yield ": waiting\n\n"
                await asyncio.sleep(view.every_s)
        finally:
            self._streams -= 1


def event(name: str, text: str) -> str:
    """Returns one event; its text may have several lines."""
    data = "\n".join(f"data: {line}" for line in text.splitlines() or [""])
    return f"event: {name}\n{data}\n\n"


def fingerprint(html: str) -> str:
    return hashlib.sha256(html.encode()).hexdigest()[:16]
