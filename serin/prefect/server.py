"""The stack's Prefect server: `python -m serin.prefect.server PORT [--no-services]`.

It is Prefect's own application, as `prefect server start` runs it, behind `Repeating`. The garbage collector is off
during the imports, which take seconds; afterwards a thread collects, not the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import uvicorn

from serin.host.standing import begin_beats, run_server
from serin.machine import environment

_HOST = "127.0.0.1"
_COLLECT_S, _FULL_EVERY = 1.0, 30
_WAITS_S = 30.0  # its loop may wait for another writer of the database
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_UNAVAILABLE: Final = 503
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_TRIES: Final = 8
_ALONE_S: Final = 5.0  # how long a repeated request waits for the others to end
_RETRY_AFTER: Final = (b"retry-after", b"1")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m serin.prefect.server", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--no-services", action="store_true", help="schedule nothing and write no events")
    given = parser.parse_args()
    gc.disable()
    prefect = importlib.import_module("prefect.server.api.server")
    settings = importlib.import_module("prefect.settings").get_current_settings().server
    gc.freeze()
    collect_beside()
    begin_beats(environment.home(), waits_s=_WAITS_S)
    config = uvicorn.Config(
        Repeating(prefect.create_app(final=True, webserver_only=given.no_services)),
        host=_HOST,
        port=given.port,
        timeout_keep_alive=settings.api.keepalive_timeout,
        ws_ping_interval=settings.api.websocket_ping_interval,
        ws_ping_timeout=settings.api.websocket_ping_timeout,
        log_level=settings.logging_level.lower(),
    )
    run_server(config)


def collect_beside() -> None:
    """Leaves garbage to a thread. A cursor among it needs its connection, which may be waiting for SQLite's lock for up
    to a minute; if the event loop waited for that, nobody would release the lock."""

    def collect() -> None:
        for number in itertools.count(1):
            time.sleep(_COLLECT_S)
            gc.collect(2 if number % _FULL_EVERY == 0 else 1)

    gc.disable()
    threading.Thread(target=collect, name="garbage", daemon=True).start()


# Many of Prefect's requests read first and write later in one transaction. SQLite refuses the write at once, without
# waiting, when another transaction was committed in between. Prefect answers 503, and its clients ask again after
# pauses of 2, 4, 8, ... 128 s: with ten pipelines at a time, runs stood still for minutes on an idle machine.
class Repeating:
    """An ASGI application: `app` with its refused requests repeated. Refused is what it answers with 503 and an
    exception; its transaction was rolled back. A repeated request runs when no other change does, so that nobody
    commits before it. What is refused to the end is answered with 503 and the request to come again after a second."""

    def __init__(self, app: App, *, tries: int = _TRIES, alone_s: float = _ALONE_S) -> None:
        self._app, self._tries, self._alone_s = app, tries, alone_s
        self._alone = asyncio.Lock()
        self._running = 0
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _READS:
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        for number in range(1, self._tries + 1):
            answer = _Answer(send)
            try:
                async with self._beside() if number == 1 else self._by_itself():
                    await self._app(dict(scope), _replay(body, receive), answer.send)
            except Exception:
                if answer.is_refusal and number < self._tries:
                    continue
                await answer.release(_RETRY_AFTER)
                raise
            await answer.release()
            return

    @asynccontextmanager
    async def _beside(self) -> AsyncIterator[None]:
        """Runs beside other changes, but not while one is repeated."""
        async with self._alone:
            self._running += 1
            self._none_runs.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._none_runs.set()

    @asynccontextmanager
    async def _by_itself(self) -> AsyncIterator[None]:
        """Waits for the changes that run, and lets none begin."""
        async with self._alone:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._alone_s):
                    await self._none_runs.wait()
            yield


class _Answer:
    """Passes an answer on, and keeps one with 503 until it is known whether the request is repeated."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._kept: list[Message] = []

    @property
    def is_refusal(self) -> bool:
        return bool(self._kept)

    async def send(self, message: Message) -> None:
        if self._kept or (message["type"] == "http.response.start" and message["status"] == _UNAVAILABLE):
            self._kept.append(message)
        else:
            await self._send(message)

    async def release(self, *headers: tuple[bytes, bytes]) -> None:
        for message in self._kept:
            more = {"headers": [*message.get("headers", ()), *headers]} if "status" in message else {}
            await self._send({**message, **more})


async def _read_body(receive: Receive) -> list[Message]:
    """The messages of a request up to the end of its body, or of its connection."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _replay(body: list[Message], receive: Receive) -> Receive:
    """Gives the messages that were read, then those that come."""
    left = iter(body)

    async def replay() -> Message:
        message: Mapping[str, Any] | None = next(left, None)
        return await receive() if message is None else dict(message)

    return replay


if __name__ == "__main__":
    main()
