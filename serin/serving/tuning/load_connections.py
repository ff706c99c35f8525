"""The load generator's connections: they send prebuilt bytes and return the kind of the answer.

Nothing is decoded, so that the server is measured and not its client.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import grpc
import grpc.aio

from serin.serving.client.address import Address
from serin.serving.client.tensors import INFER_METHOD

REFUSED: Final = "refused"  # no connection
CLOSED: Final = "closed"  # the connection ended before the answer
UNREADABLE: Final = "unreadable"  # an answer that is not HTTP
TIMEOUT: Final = "timeout"

Done = Callable[[str], None]
"""Called once, later than the request is sent: with an HTTP status, a gRPC code or one of the names above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The requests to send in turn, and their address: whole HTTP requests, or gRPC messages for ModelInfer."""

    address: Address
    requests: tuple[bytes, ...]
    protocol: Literal["http", "grpc"] = "http"
    metadata: tuple[tuple[str, str], ...] = ()  # with each gRPC call
    timeout_s: float = 30.0


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


class GrpcConnection:
    """One gRPC channel, as an independent client would have."""

    def __init__(self, target: Target) -> None:
        self._target = target
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        address = target.address
        if address.tls:
            trusted = grpc.ssl_channel_credentials(address.ca.read_bytes() if address.ca else None)
            self._channel = grpc.aio.secure_channel(str(address), trusted, options=options)
        else:
            self._channel = grpc.aio.insecure_channel(str(address), options=options)
        self._ask = self._channel.unary_unary(INFER_METHOD)
        self._call: asyncio.Task[None] | None = None

    def send(self, number: int, done: Done) -> None:
        self._call = asyncio.get_running_loop().create_task(self._answer(self._target.requests[number], done))

    async def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def _answer(self, request: bytes, done: Done) -> None:
        target = self._target
        try:
            await self._ask(request, timeout=target.timeout_s, metadata=target.metadata)
        except grpc.aio.AioRpcError as error:
            done(error.code().name)
        else:
            done("OK")
