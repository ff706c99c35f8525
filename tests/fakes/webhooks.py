"""A webhook's server: stores what it is sent, and answers, refuses or hangs as the test says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any


class Webhook:
    """`code`: the status of the next answers. While `hangs` is set, nothing is answered."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.connections = 0
        self.code = 200
        self.hangs = threading.Event()
        self.arrived = threading.Condition()
        self.released = threading.Event()
        self.url = ""

    def wait_for(self, number: int, timeout_s: float = 30.0) -> list[dict[str, Any]]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.got) >= number, timeout_s), f"got {self.got}"
        return self.got

    def wait_for_connections(self, number: int, timeout_s: float = 30.0) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.connections >= number, timeout_s)


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    hook = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with hook.arrived:
                hook.connections += 1
                hook.arrived.notify_all()
            if hook.hangs.is_set():
                hook.released.wait(60)
                return
            if hook.code < 300:
                with hook.arrived:
                    hook.got.append(content)
                    hook.arrived.notify_all()
            self.send_response(hook.code)
            self.send_header("Location", hook.url)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingTCPServer(
        ("127.0.0.1", 0), Handler
    )  # HTTPServer would ask a name server for its own name
    server.daemon_threads = True
    hook.url = f"http://127.0.0.1:{server.server_address[1]}/T0KEN"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hook
    finally:
        hook.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
