"""A server that speaks like Prefect's where it was told to."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from serin.prefect import rest_api
from tests.kit.web import Handler, WebServer, in_a_thread

FAILED_RUN = {
    "id": "7",
    "name": "brave-owl",
    "flow_id": "f",
    "state_type": "FAILED",
    "state_name": "Failed",
    "state": {
        "type": "FAILED",
        "timestamp": "2026-11-15T10:00:00+00:00",
        "message": "column 'age' is missing",
    },
    "start_time": "2026-11-15T10:00:00+00:00",
    "estimated_run_time": 3.0,
    "tags": ["serin", "flights"],
    "parameters": {"spec": "spec.yaml"},
}


class Server:
    """Answers what it was told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.refusals = 0  # of the next requests, because it is busy
        self.asked: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Answering(Handler):
            def _answer(self) -> None:
                body = self.read_body()
                call = f"{self.command} {self.path.removeprefix('/api')}"
                outer.asked.append((call, json.loads(body) if body else None))
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                code, content = outer.answers.get(call.partition("?")[0], (404, {"detail": "no such thing"}))
                if outer.refusals > 0:
                    outer.refusals -= 1
                    code, content = 503, {"exception_message": "Service Unavailable"}
                self.answer(json.dumps(content).encode(), code)

            do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 (names that http.server looks for)

        self.http = WebServer(Answering)
        self.url = f"http://127.0.0.1:{self.http.server_port}/api"


@contextmanager
def prefect_at_work() -> Iterator[Server]:
    rest_api._TOKENS.clear()  # of a server that had the same port
    made = Server()
    with in_a_thread(made.http):
        yield made
