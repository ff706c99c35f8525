"""The gateway's limits, each met for real, and who answers for whom where a release fails or is silent."""

import http.client
import json
import re
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from serin.errors import EnvoyFileUnfit
from serin.formats.serving.request import Request
from serin.formats.serving.request_log import read_requests
from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import PROCESS_NAME, Gateway
from serin.serving.envoy.routes import Timeouts
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.fuzz_requests import good_frame
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.kit.web import Handler, WebServer, ask, in_a_thread, web_server
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA, infer_inputs

V1, V2 = (Release(model=MODEL, version=version) for version in (1, 2))
INFER = f"/v2/models/{MODEL}/infer"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "secure.md"
GRPC = {"content-type": "application/grpc", "te": "trailers"}


class Silent:
    """A gRPC server that takes every call and answers none."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._wires: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for wire in (self._listener, *self._wires):
            wire.close()

    def hang_up(self) -> None:
        for wire in self._wires[:]:
            wire.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        try:
            while True:
                wire, _ = self._listener.accept()
                self._wires.append(wire)
                threading.Thread(target=self._listen, args=(wire,), daemon=True).start()
        except OSError:
            return

    def _listen(self, wire: socket.socket) -> None:
        settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
        window = bytes([0, 0, 4, 8, 0, 0, 0, 0, 0]) + (2**30).to_bytes(4, "big")
        try:
            wire.sendall(settings + window)
            while wire.recv(65536):
                pass
        except OSError:
            return


class Many:
    """Many calls at once on one connection; what came back, by status."""

    def __init__(self, port: int, count: int) -> None:
        self.seen: Counter[str] = Counter()
        self._wire = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._state.initiate_connection()
        self._turn = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        fixed = {":method": "POST", ":scheme": "http", ":path": f"{SERVICE}/ModelInfer", ":authority": "x"}
        frame = good_frame()
        for _ in range(count):
            with self._turn:
                while self._state.outbound_flow_control_window < len(frame):
                    self._turn.release()
                    threading.Event().wait(0.005)
                    self._turn.acquire()
                stream = self._state.get_next_available_stream_id()
                self._state.send_headers(stream, [*fixed.items(), *GRPC.items()])
                self._state.send_data(stream, frame, end_stream=True)
                self._wire.sendall(self._state.data_to_send())

    def close(self) -> None:
        self._wire.shutdown(socket.SHUT_RDWR)
        self._wire.close()

    def _read(self) -> None:
        try:
            while data := self._wire.recv(65536):
                with self._turn:
                    for event in self._state.receive_data(data):
                        if isinstance(event, h2.events.ResponseReceived):
                            self.seen[dict(event.headers)["grpc-status"]] += 1
                    self._wire.sendall(self._state.data_to_send())
        except OSError:
            return


def lead_to(gateway: Gateway, *, web: int = 1, calls: int = 1, text_bytes: int | None = None) -> None:
    place = Endpoint(http=f"127.0.0.1:{web}", grpc=f"127.0.0.1:{calls}")
    limits = {MODEL: Timeouts(request_s=60.0, max_text_bytes=text_bytes)}
    gateway.apply([ModelRoute(model=MODEL, epoch=1, stable=V1)], {V1.name: place}, limits)


def post(port: int, body: Any, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        chunked = headers.get("transfer-encoding") == "chunked"
        connection.request("POST", INFER, body, headers, encode_chunked=chunked)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def stat(gateway: Gateway, name: str) -> int:
    return sum(map(int, gateway.admin.stats(rf"(^|\.){re.escape(name)}$").values()))


def test_a_body_that_is_too_large_and_connections_that_are_too_many_are_refused() -> None:
    with lone_gateway(max_request_bytes=100_000, max_connections=12) as (gateway, port, host):
        lead_to(gateway)
        too_large = (413, '{"error":"Payload Too Large"}\n')
        assert post(port, b"0" * 100_001) == too_large
        pieces = iter([b"0" * 30_000] * 4)
        assert post(port, pieces, **{"transfer-encoding": "chunked"}) == too_large
        long = {**bundles.rows(1), "carrier": np.array([["x" * 100_001]], dtype=object)}
        with (
            tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
            pytest.raises(InferenceServerException, match="Payload Too Large"),
        ):
            client.infer(MODEL, infer_inputs(tritonclient.grpc, long, SCHEMA))

        with ExitStack() as held:

            def admitted() -> bool:
                """Whether one more is let in, and stays."""
                wire = socket.create_connection(("127.0.0.1", port), timeout=20)
                held.callback(wire.close)
                wire.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n")
                try:
                    return wire.recv(100).startswith(b"HTTP/1.1 200")
                except ConnectionResetError:
                    return False

            wait_for(
                "those before to be gone",
                lambda: stat(gateway, f"listener.127.0.0.1_{port}.downstream_cx_active") == 0,
                host,
            )
            assert [admitted() for _ in range(14)] == [True] * 12 + [False] * 2
        wait_for("room", lambda: post_ok(port), host)


def test_a_text_that_is_far_too_long_is_refused_before_anybody_reads_it() -> None:
    passed = 503  # let in; nobody listens behind
    with lone_gateway() as (gateway, port, host):

        def say(text: str) -> tuple[int, str]:
            return post(port, json.dumps({"inputs": [{"name": "carrier", "data": ["AA", text]}]}))

        def lets_in(text: str) -> bool:
            """Also by every one of Envoy's threads: they take new routes a moment later than it says."""
            return all(say(text)[0] == passed for _ in range(6))

        lead_to(gateway, text_bytes=1000)
        wait_for("the route", lambda: lets_in("x"), host)
        too_long = (
            400,
            '{"error":"a text in the request is too long; at most 1000 bytes are taken"}\n',
        )
        assert say("x" * 20_000_000) == too_long
        assert say('"' * 6000) == too_long, "12,000 as it is written"
        assert say("\u00e9" * 1000)[0] == passed, (
            "6,000 as it is written, and what Triton reads is not too long"
        )
        assert say("x" * 4000)[0] == passed, "near the limit the release itself decides"
        many = {"inputs": [{"name": "carrier", "data": ["x" * 900] * 100}]}
        assert post(port, json.dumps(many))[0] == passed
        lead_to(gateway)
        wait_for("a release whose limit is not known", lambda: lets_in("x" * 1_000_000), host)


def test_a_client_gets_retry_after_at_once_while_no_release_can_answer() -> None:
    with lone_gateway() as (gateway, port, host):
        lead_to(gateway)
        wait_for("the route", lambda: post_ok(port), host)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", INFER, b"{}")
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("retry-after")) == (503, "1")
        assert "error" in json.loads(answer.read())
        connection.request("GET", "/v2/models/none", b"{}")
        assert connection.getresponse().getheader("retry-after") is None
        connection.close()


def post_ok(port: int) -> bool:
    try:
        return post(port, b"{}")[0] == 503  # let in; nobody listens behind
    except (OSError, http.client.HTTPException):
        return False


def test_what_is_more_than_a_release_may_have_at_once_is_refused_at_once() -> None:
    silent = Silent()
    with lone_gateway() as (gateway, port, host):
        lead_to(gateway, calls=silent.port)
        crowds = [Many(port, 600), Many(port, 600)]
        wait_for(
            "the refusals",
            lambda: (
                sum(sum(crowd.seen.values()) for crowd in crowds) >= 1200 - 1024 - 16
            ),  # Envoy's threads do not count to the last one
            host,
            PROCESS_NAME,
        )
        seen = crowds[0].seen + crowds[1].seen
        print(f"1,200 calls at once: {dict(seen)}, {gateway.active_requests(V1)} wait")
        assert set(seen) == {"14"}, "UNAVAILABLE: the declared answer to too much"
        assert gateway.active_requests(V1) <= 1024 + 16
        for crowd in crowds:
            crowd.close()
        wait_for("the end of all", lambda: gateway.active_requests(V1) == 0, host)
    silent.close()


def test_a_release_that_hangs_up_does_not_get_every_request_twice_and_a_slow_one_none() -> None:
    silent = Silent()
    with lone_gateway() as (gateway, port, host):
        lead_to(gateway, calls=silent.port)
        crowd = Many(port, 200)
        wait_for("all calls", lambda: gateway.active_requests(V1) == 200, host)
        assert stat(gateway, "upstream_rq_retry") == 0
        silent.hang_up()
        kinds = ("upstream_rq_retry", "upstream_rq_retry_overflow")
        wait_for("200 decisions", lambda: sum(stat(gateway, kind) for kind in kinds) == 200, host)
        again, not_again = (stat(gateway, kind) for kind in kinds)
        print(f"200 broken calls: {again} tried again, {not_again} not")
        assert 0 < again <= 100
        wait_for("the answers", lambda: crowd.seen["14"] == not_again, host)
        crowd.close()
    silent.close()


def test_a_gateway_that_closes_answers_open_requests_and_accepts_no_new_ones() -> None:
    asked, let_go = threading.Event(), threading.Event()

    class Slow(Handler):
        def do_POST(self) -> None:
            self.read_body()
            asked.set()
            assert let_go.wait(30)
            self.answer(b"")

    with web_server(Slow) as web, lone_gateway() as (gateway, port, host):
        lead_to(gateway, web=web)
        inside = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        inside.request("POST", INFER, b"{}")
        assert asked.wait(20)
        gateway.close()
        wait_for("the gateway to close", lambda: shut(port), host)
        assert gateway.active_requests(V1) == 1
        let_go.set()
        answer = inside.getresponse()
        assert (answer.status, answer.getheader("connection")) == (200, "close")
        inside.close()


def shut(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=20).close()
    except ConnectionRefusedError:
        return True
    return False


# what an expert adds

HEADER = {
    "name": "ours",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
        "mutations": {"response_mutations": [{"append": {"header": {"key": "x-team", "value": "ours"}}}]},
    },
}


def listener(socket_path: Path, kind: str = "HttpConnectionManager") -> dict[str, Any]:
    manager = {
        "@type": f"type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.{kind}",
        "stat_prefix": "mine",
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
                {"match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": "mine"}}}]}],
        },
        "http_filters": [{"name": "router", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}],
    }  # fmt: skip
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": "mine", "address": {"pipe": {"path": str(socket_path)}}, "filter_chains": [chain]}


def test_an_expert_s_own_listener_and_filter_are_added_and_what_envoy_refuses_is_said(tmp_path: Path) -> None:
    file, place = tmp_path / "envoy.yaml", Path(tempfile.mkdtemp(prefix="serin-x-"))
    own = {"static_resources": {"listeners": [listener(place / "s")]}}
    file.write_text(json.dumps({"http_filters": [HEADER], "bootstrap": own}))
    with lone_gateway(expert=file) as (_, port, __):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/v2/health/live")
        assert connection.getresponse().getheader("x-team") == "ours"
        connection.close()
        with socket.socket(socket.AF_UNIX) as wire:
            wire.connect(str(place / "s"))
            wire.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert wire.makefile("rb").read().endswith(b"mine")
    shutil.rmtree(place)

    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    file.write_text(shown)
    gateway = Gateway(tmp_path / "g", admin=tmp_path / "a.sock", log=tmp_path / "g" / "log")
    assert gateway.write_bootstrap(1, expert=file).exists(), "Envoy takes what the page shows"
    wrong: dict[str, Callable[[], object]] = {
        "mine": lambda: {
            "bootstrap": {"static_resources": {"listeners": [listener(tmp_path / "s", "Mine")]}}
        },
        "no_such_key": lambda: {"bootstrap": {"no_such_key": 1}},
    }
    for words, content in wrong.items():
        file.write_text(json.dumps(content()))
        with pytest.raises(EnvoyFileUnfit, match=f"(?is)envoy.yaml cannot be added.*Envoy says:.*{words}"):
            gateway.write_bootstrap(1, expert=file)


STABLE, CANDIDATE = Release(model="m", version=1), Release(model="m", version=2)
HANGS_UP, ASKED = 0, 24


class Server(WebServer):
    """Answers every inference in the one way it was told to."""

    status = 200


class Answering(Handler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        self.read_body()
        if self.server.status == HANGS_UP:
            self.close_connection = True
            return
        self.answer(b"", self.server.status)


def logged_requests(port: int, log: Path, epoch: int, host: ChildHost) -> list[Request]:
    """What the log says of requests in an epoch; one of Envoy's threads may go by the last one for a moment."""
    lines: list[Request] = []

    def enough() -> bool:
        ask(port, "/v2/models/m/infer", b"{}")
        lines[:] = [line for line in read_requests(log).requests if line.epoch == epoch]
        return len(lines) >= ASKED

    wait_for("the log", enough, host)
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
    servers = [in_a_thread(Server(Answering)) for _ in range(2)]
    with servers[0] as stable, servers[1] as candidate, lone_gateway() as (gateway, port, host):
        places = {
            release.name: Endpoint(http=f"127.0.0.1:{each.server_port}", grpc="127.0.0.1:1")
            for release, each in ((STABLE, stable), (CANDIDATE, candidate))
        }
        for epoch, ((stable.status, candidate.status), wanted) in enumerate(cases.items()):
            route = ModelRoute(
                model="m", epoch=epoch, stable=STABLE, candidate=CANDIDATE, candidate_percent=50.0
            )
            gateway.apply([route], places, {"m": Timeouts(request_s=20.0)})
            lines = logged_requests(port, gateway.log, epoch, host)
            assert {(line.arm, line.code, line.attempts) for line in lines} == wanted
        stable.status, candidate.status = HANGS_UP, 200
        assert ask(port, "/v2/models/m/versions/1/infer", b"{}").status == 503, (
            "who names a version gets no other"
        )
        assert ask(port, "/v2/models/m/versions/2/infer", b"{}").status == 200


@pytest.mark.parametrize("candidate", [V2, None], ids=["of a rollout", "of one release"])
def test_a_request_is_answered_that_began_before_its_release_left(candidate: Release | None) -> None:
    """Its route is chosen when it begins, and its body may take longer than a promotion."""

    class Release1or2(Handler):
        def do_POST(self) -> None:
            self.read_body()
            self.answer(b"{}")

    with web_server(Release1or2) as web, lone_gateway() as (gateway, port, host):
        place = Endpoint(http=f"127.0.0.1:{web}", grpc="127.0.0.1:1")
        both = {V1.name: place, V2.name: place}
        percent = 50 if candidate else 0
        before = ModelRoute(model=MODEL, epoch=1, stable=V1, candidate=candidate, candidate_percent=percent)
        gateway.apply([before], both)
        slow = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(16)]
        for each in slow:
            each.sendall(f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{{".encode())
        wait_for("their beginning", lambda: stat(gateway, "downstream_rq_active") >= len(slow), host)

        after = ModelRoute(model=MODEL, epoch=2, stable=V2)
        gateway.apply([after], both, leaving=[V1.name])
        assert gateway.arriving_requests() == len(slow), "V1 must not be stopped yet"
        gateway.apply([after], {V2.name: place})
        for each in slow:
            each.sendall(b"}")
        assert {each.recv(1000).partition(b"\r\n")[0] for each in slow} == {b"HTTP/1.1 200 OK"}

        wait_for("the end of all", lambda: gateway.arriving_requests() == 0, host)
        gateway.apply([after], {V2.name: place})
        assert not gateway.admin.stats(f"^cluster.{V1.name}")
        for each in slow:
            each.close()
