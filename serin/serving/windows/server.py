"""HTTP/1.1 for the gateway on a unix socket: whole requests with a length, one answer each, connections that stay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serin.machine.ports import private_socket

_MOST_HEAD: Final = 64 << 10
_MOST_BODY: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """`json_bytes`: of a body with binary tensors behind its JSON."""

    status: int
    body: bytes
    json_bytes: int | None = None


Handle = Callable[[str, Mapping[str, str], bytes], Answer | Coroutine[Any, Any, Answer]]
"""Path, headers and body to the answer, or to what gives it later."""


class _Connection(asyncio.Protocol):
    def __init__(self, handle: Handle) -> None:
        self._handle, self._waiting = handle, bytearray()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[Answer] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        while self._task is None and self._answer_one():
            pass

    def _answer_one(self) -> bool:
        """Answers the first request that has come completely; False when there is none."""
        assert self._transport is not None
        end = self._waiting.find(b"\r\n\r\n")
        if end < 0:
            if len(self._waiting) > _MOST_HEAD:
                self._transport.close()
            return False
        first, *lines = self._waiting[:end].decode("latin-1").split("\r\n")
        headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length") or 0)
        if length > _MOST_BODY or "transfer-encoding" in headers:
            self._transport.close()
            return False
        whole = end + 4 + length
        if len(self._waiting) < whole:
            return False
        body = bytes(self._waiting[end + 4 : whole])
        del self._waiting[:whole]
        method, path, _ = first.split(" ", 2)
        found = self._handle(path, headers | {":method": method}, body)
        if isinstance(found, Coroutine):
            self._task = asyncio.create_task(found)
            self._task.add_done_callback(self._send_later)
        else:
            self._send(found)
        return True

    def _send_later(self, task: asyncio.Task[Answer]) -> None:
        self._task = None
        assert self._transport is not None
        if (error := task.exception()) is not None:
            self._transport.close()  # the gateway refuses the request at once
            raise error
        self._send(task.result())
        self.data_received(b"")

    def _send(self, found: Answer) -> None:
        assert self._transport is not None
        extra = "" if found.json_bytes is None else f"inference-header-content-length: {found.json_bytes}\r\n"
        head = f"HTTP/1.1 {found.status} -\r\ncontent-length: {len(found.body)}\r\n{extra}\r\n"
        self._transport.write(head.encode() + found.body)


async def serve(path: Path, handle: Handle, stop: asyncio.Event) -> None:
    """Answers at the socket `path` until `stop` is set."""
    listening = private_socket(path)
    server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(handle), sock=listening)
    try:
        await stop.wait()
    finally:
        server.close()
