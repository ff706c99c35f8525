"""A proxy in front of an HTTP server that fails on purpose: throttles, resets, stalls, slows down or calls the test.

It understands requests and responses with a Content-Length or in chunks, which is what clients and servers of S3 send.
"""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_PIECE = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    number: int  # from 1, over all connections
    method: str
    path: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`status` and `code`: answered instead of the server. `cut`: the connection is reset after half of the request's
    or the response's body. `stall_s`: silent for so long before half of the response. `bytes_per_s`: of the response.
    `halfway`: called after half of the request's body has been passed on."""

    status: int = 0
    code: str = ""
    cut: str = ""  # request, response
    stall_s: float = 0.0
    bytes_per_s: float = 0.0
    halfway: Callable[[], None] | None = None


Choose = Callable[[Request], Fault | None]


@dataclass(slots=True)
class Proxy:
    """`choose` decides on each request. `seen`: all requests; `failed`: those with a fault."""

    url: str
    choose: Choose
    seen: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, method: str, path: str, headers: dict[str, str]) -> Fault | None:
        with self.lock:
            request = Request(number=len(self.seen) + 1, method=method, path=path, headers=headers)
            self.seen.append(request)
        fault = self.choose(request)
        if fault is not None:
            self.failed.append(request)
        return fault


@contextmanager
def fault_proxy(endpoint: str, choose: Choose) -> Iterator[Proxy]:
    """Listens on loopback in front of `endpoint` (http://host:port)."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    proxy = Proxy(f"http://127.0.0.1:{listener.getsockname()[1]}", choose)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=_serve, args=(proxy, client, (host, int(port))), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield proxy
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


class _Cut(Exception):
    pass


def _serve(proxy: Proxy, client: socket.socket, server: tuple[str, int]) -> None:
    with suppress(OSError), client, socket.create_connection(server) as upstream:
        try:
            with client.makefile("rb") as asked, upstream.makefile("rb") as answered:
                while _pass_one(proxy, client, upstream, asked, answered):
                    pass
        except _Cut:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST, not FIN


def _pass_one(proxy: Proxy, client: socket.socket, upstream: socket.socket, asked, answered) -> bool:  # type: ignore[no-untyped-def]
    first, headers, head = _head(asked)
    if not first:
        return False
    method, path, _ = first.split(" ", 2)
    fault = proxy.count(method, path, headers) or Fault()
    if "expect" in headers:
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))
    size = int(headers.get("content-length", 0))
    if fault.status:
        asked.read(size)
        client.sendall(_refusal(fault))
        return False
    upstream.sendall(head)
    _copy(asked, upstream, size // 2)
    if fault.halfway is not None:
        fault.halfway()
    if fault.cut == "request":
        raise _Cut
    _copy(asked, upstream, size - size // 2)
    return _answer(method, fault, client, answered)


def _answer(method: str, fault: Fault, client: socket.socket, answered) -> bool:  # type: ignore[no-untyped-def]
    first, headers, head = _head(answered)
    if not first:
        return False
    client.sendall(head)
    if method == "HEAD" or first.split(" ")[1] in ("204", "304"):
        return True
    if headers.get("transfer-encoding") == "chunked":
        while (line := answered.readline()) and int(line.split(b";")[0], 16):
            client.sendall(line + answered.read(int(line.split(b";")[0], 16) + 2))
        client.sendall(line + answered.readline())
        return True
    size = int(headers.get("content-length", 0))
    _copy(answered, client, size // 2, fault.bytes_per_s)
    if fault.cut == "response":
        raise _Cut
    time.sleep(fault.stall_s)
    _copy(answered, client, size - size // 2, fault.bytes_per_s)
    return headers.get("connection") != "close"


def _head(stream) -> tuple[str, dict[str, str], bytes]:  # type: ignore[no-untyped-def]
    lines = []
    while (line := stream.readline()) not in (b"\r\n", b""):
        lines.append(line)
    if not lines:
        return "", {}, b""
    pairs = (line.decode().partition(":") for line in lines[1:])
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return lines[0].decode(), headers, b"".join(lines) + b"\r\n"


def _copy(source, target: socket.socket, size: int, bytes_per_s: float = 0.0) -> None:  # type: ignore[no-untyped-def]
    while size > 0:
        piece = source.read(min(size, _PIECE))
        if not piece:
            raise _Cut
        target.sendall(piece)
        size -= len(piece)
        if bytes_per_s:
            time.sleep(len(piece) / bytes_per_s)


def _refusal(fault: Fault) -> bytes:
    body = (
        f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>on purpose</Message></Error>".encode()
    )
    head = f"HTTP/1.1 {fault.status} Refused\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
