"""Who answers for whom: the stable release where a candidate fails, the candidate where the stable one is silent."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from serin.formats.serving.request import Request
from serin.formats.serving.request_log import read_requests
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.serving.envoy.routes import Timeouts
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.serving_stack import lone_gateway

V1, V2 = Release(model="m", version=1), Release(model="m", version=2)
HANGS_UP, ASKED = 0, 24


class Server(ThreadingHTTPServer):
    """Answers every inference in the one way it was told to."""

    daemon_threads = True
    status = 200


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.server.status == HANGS_UP:
            self.close_connection = True
            return
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def ask(port: int, path: str = "/v2/models/m/infer") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", path, b"{}")
        return connection.getresponse().status
    finally:
        connection.close()


def asked(port: int, log: Path, epoch: int, host: ChildHost) -> list[Request]:
    """What the log says of requests in an epoch; one of Envoy's threads may go by the last one for a moment."""
    lines: list[Request] = []

    def enough() -> bool:
        ask(port)
        lines[:] = [line for line in read_requests(log).requests if line.epoch == epoch]
        return len(lines) >= ASKED

    wait_for("the log", enough, host, PROCESS_NAME)
    return lines


def test_the_stable_release_is_answered_for_where_it_is_silent_and_a_candidate_also_where_it_fails() -> None:
    cases = {
        # what stable and candidate do: what clients of each arm get, after how many tries
        (200, 200): {("stable", 200, 1), ("candidate", 200, 1)},
        (500, 200): {("stable", 500, 1), ("candidate", 200, 1)},
        (503, 200): {("stable", 200, 2), ("candidate", 200, 1)},
        (HANGS_UP, 200): {("stable", 200, 2), ("candidate", 200, 1)},
        (200, 500): {("stable", 200, 1), ("candidate", 200, 2)},
        (200, HANGS_UP): {("stable", 200, 1), ("candidate", 200, 2)},
        (HANGS_UP, HANGS_UP): {("stable", 503, 2), ("candidate", 503, 2)},
    }
    with server() as stable, server() as candidate, lone_gateway() as (gateway, port, host):
        places = {
            release.name: Endpoint(http=f"127.0.0.1:{each.server_port}", grpc="127.0.0.1:1")
            for release, each in ((V1, stable), (V2, candidate))
        }
        for epoch, ((stable.status, candidate.status), wanted) in enumerate(cases.items()):
            route = ModelRoute(model="m", epoch=epoch, stable=V1, candidate=V2, candidate_percent=50.0)
            gateway.apply([route], places, {"m": Timeouts(request_s=20.0)})
            lines = asked(port, gateway.log, epoch, host)
            assert {(line.arm, line.code, line.attempts) for line in lines} == wanted
        stable.status, candidate.status = HANGS_UP, 200
        assert ask(port, "/v2/models/m/versions/1/infer") == 503, "who names a version gets no other"
        assert ask(port, "/v2/models/m/versions/2/infer") == 200
