"""A server that speaks like Prefect's where it was told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from serin.stack.prefect import rest_api


class Server:
    """Answers what it was told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.refusals = 0  # of the next requests, because it is busy
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                call = f"{self.command} {self.path.removeprefix('/api')}"
                outer.asked.append((call, json.loads(body) if body else None))
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                code, content = outer.answers.get(call.partition("?")[0], (404, {"detail": "no such thing"}))
                if outer.refusals > 0:
                    outer.refusals -= 1
                    code, content = 503, {"exception_message": "Service Unavailable"}
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 (names that http.server looks for)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/api"


@contextmanager
def prefect_at_work() -> Iterator[Server]:
    rest_api._TOKENS.clear()  # of a server that had the same port
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.http.shutdown()
        made.http.server_close()
        thread.join()
