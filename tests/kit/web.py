"""HTTP on this machine: servers in a thread of the test, and one request with its answer."""

import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from typing import Any, TypeVar

S = TypeVar("S", bound=BaseServer)


class Handler(BaseHTTPRequestHandler):
    """Says nothing in the terminal."""

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"] or 0))

    def answer(self, body: bytes = b"{}", status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class WebServer(ThreadingHTTPServer):
    """On a free port of this machine or of `host`, a thread per connection. Many may connect at once: a connection
    beyond the backlog, which is 5 by default, waits a second for its next try, and a gateway gives it up."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), handler)


@contextmanager
def in_a_thread(server: S) -> Iterator[S]:
    """Serves within the block; then the server is closed and its thread has ended."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


@contextmanager
def web_server(handler: type[BaseHTTPRequestHandler], host: str = "127.0.0.1") -> Iterator[int]:
    """The port at which `handler` answers."""
    with in_a_thread(WebServer(handler, host)) as server:
        yield server.server_port


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    headers: http.client.HTTPMessage


def ask(
    place: int | str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    method: str = "",
    timeout_s: float = 20.0,
    tls: ssl.SSLContext | None = None,
) -> Answer:
    """One request to host:port, or to a port of this machine, over a connection of its own. A body that is neither
    bytes nor text nor `slowly` is sent as JSON, and with a body it is a POST."""
    host = f"127.0.0.1:{place}" if isinstance(place, int) else place
    connection = (
        http.client.HTTPSConnection(host, timeout=timeout_s, context=tls)
        if tls
        else http.client.HTTPConnection(host, timeout=timeout_s)
    )
    data = body if body is None or isinstance(body, bytes | str | Iterator) else json.dumps(body)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, data, dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, answer.read().decode(), answer.headers)
    finally:
        connection.close()


def slowly(body: bytes, takes_s: float) -> tuple[Iterator[bytes], dict[str, str]]:
    """A body that takes so long to arrive, and its header."""

    def parts() -> Iterator[bytes]:
        yield body[:-1]
        time.sleep(takes_s)
        yield body[-1:]

    return parts(), {"content-length": str(len(body))}


def answers(place: int | str, path: str, body: Any = None) -> bool:
    """Whether it answers this with 200."""
    try:
        return ask(place, path, body).status == 200
    except (OSError, http.client.HTTPException):
        return False
