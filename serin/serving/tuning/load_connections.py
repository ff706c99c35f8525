"""The load generator's connections: they send prebuilt bytes and return the kind of the answer.

Nothing is decoded, so that the server is measured and not its client.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from serin.serving.client.address import Address

REFUSED: Final = "refused"  # no connection
CLOSED: Final = "closed"  # the connection ended before the answer
UNREADABLE: Final = "unreadable"  # an answer that is not HTTP
TIMEOUT: Final = "timeout"

Done = Callable[[str], None]
"""Called once, later than the request is sent: with a status or one of the names above."""


class Connection(Protocol):
    """One client's connection, with one request at a time."""

    def send(self, number: int, done: Done) -> None: ...

    async def close(self) -> None: ...


class HttpConnection:
    """HTTP/1.1, kept alive, opened when it is needed, one request at a time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._ssl: ssl.SSLContext | None = target.address.ssl_context()
        self._wire: _Wire | None = None
        self._done: Done | None = None
        self._deadline = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None

    def send(self, number: int, done: Done) -> None:
        self._done = done
        self._deadline = self._loop.time() + self._target.timeout_s
        if self._watch is None:
            self._watch = self._loop.call_at(self._deadline, self._look)
        if self._wire is not None and self._wire.transport is not None:
            self._wire.transport.write(self._target.requests[number])
        else:
            self._opening = self._loop.create_task(self._open(self._target.requests[number]))

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._opening is not None:
            self._opening.cancel()
        self._done = None
        self._drop()

    def finish(self, kind: str, *, keep: bool) -> None:
        """Completes a request, called by the wire. A connection that cannot be reused is dropped."""
        if not keep:
            self._drop()
        done, self._done = self._done, None
        if done is not None:
            done(kind)

    async def _open(self, request: bytes) -> None:
        address = self._target.address
        wire = _Wire(self)
        try:
            await self._loop.create_connection(lambda: wire, address.host, address.port, ssl=self._ssl)
        except OSError:
            self.finish(REFUSED, keep=False)
            return
        if self._done is not None and wire.transport is not None:
            self._wire = wire
            wire.transport.write(request)
        else:
            wire.leave()  # it took too long, or is closed again

    def _look(self) -> None:
        """Checks for late requests with one timer for many of them."""
        self._watch = None
        if self._done is None:
            return
        if self._loop.time() < self._deadline:
            self._watch = self._loop.call_at(self._deadline, self._look)
            return
        if self._opening is not None:
            self._opening.cancel()
        self.finish(TIMEOUT, keep=False)

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.leave()
            self._wire = None


class _Wire(asyncio.Protocol):
    """One TCP connection: finds the end of each answer."""

    def __init__(self, owner: HttpConnection) -> None:
        self.transport: asyncio.Transport | None = None
        self._owner: HttpConnection | None = owner
        self._received = b""
        self._needed = 0  # bytes of the answer, once its head is read: a body in pieces is read once

    def leave(self) -> None:
        self._owner = None
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.transport = None
        if self._owner is not None:
            self._owner.finish(CLOSED, keep=False)

    def data_received(self, data: bytes) -> None:
        self._received = self._received + data if self._received else data
        if len(self._received) < self._needed:
            return
        end_of_head = self._received.find(b"\r\n\r\n")
        if end_of_head < 0:
            return
        head = self._received[:end_of_head].lower()
        try:
            end = _end_of_answer(head, self._received, end_of_head + 4)
        except ValueError:
            end, head = len(self._received), b""
        if end is None or len(self._received) < end:
            self._needed = end or 0
            return
        self._needed = 0
        self._received = self._received[end:]
        if self._owner is not None:
            kind = head[9:12].decode("ascii", "replace") if head.startswith(b"http/1.") else UNREADABLE
            self._owner.finish(kind, keep=kind != UNREADABLE and b"connection: close" not in head)


def _end_of_answer(head: bytes, received: bytes, start: int) -> int | None:
    """Returns where the answer ends; None when that is not known yet."""
    _, found, rest = head.partition(b"\r\ncontent-length:")
    if found:
        return start + int(rest.partition(b"\r\n")[0])
    if b"\r\ntransfer-encoding: chunked" not in head:
        return start
    while (line := received.find(b"\r\n", start)) >= 0:
        size = int(received[start:line].partition(b";")[0], 16)
        start = line + 2 + size + 2
        if size == 0:
            return start
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The requests to send in turn, whole as `connect`'s connections send them, and their address."""

    address: Address
    requests: tuple[bytes, ...]
    timeout_s: float = 30.0
    connect: Callable[[Any], Connection] = HttpConnection
