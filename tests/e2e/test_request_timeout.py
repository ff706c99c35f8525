"""How long a request may take: as long as its server's spec says, with or without another release to turn to. And how
long a client had waited that went away."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from tritonclient.grpc import service_pb2

from serin.formats.serving.request_log import read_requests
from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.serving.envoy.routes import Timeouts
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.fakes.kserve import serving

SLOW_S = 1.6  # longer than a second try would wait, whatever it is derived from


def ask(port: int, model: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{model}/infer", b'{"inputs": []}')
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def test_a_slow_server_has_the_whole_time_and_scores_each_request_once() -> None:
    """Also while a candidate that hangs is asked as well: the first answer counts, and no answer in time is lost."""
    alone = Release(model="alone", version=1)
    stable, candidate = (Release(model="split", version=version) for version in (1, 2))
    with (
        serving(delay_s=SLOW_S) as slow,
        serving(delay_s=SLOW_S) as live,
        serving(delay_s=30.0) as hanging,
        lone_gateway() as (gateway, port, host),
    ):
        places = {
            release.name: Endpoint(http=server.address, grpc=server.address)
            for release, server in ((alone, slow), (stable, live), (candidate, hanging))
        }
        routes = [
            ModelRoute(model="alone", epoch=1, stable=alone),
            ModelRoute(model="split", epoch=1, stable=stable, candidate=candidate, candidate_percent=0.01),
        ]
        limits = {
            "alone": Timeouts.from_spec(ServingSpec(request_timeout=30.0)),
            "split": Timeouts.from_spec(ServingSpec(request_timeout=2.8)),
        }
        gateway.apply(routes, places, limits)
        wait_for("the routes", lambda: ask(port, "none") == 404, host, PROCESS_NAME)
        with ThreadPoolExecutor(2) as both:
            assert list(both.map(lambda model: ask(port, model), ("alone", "split"))) == [200, 200]
        wait_for("the log", lambda: len(read_requests(gateway.log).requests) == 2, host, PROCESS_NAME)
        tries = {line.model: line.attempts for line in read_requests(gateway.log).requests}
        assert tries == {"alone": 1, "split": 2}
        assert (slow.asked, live.asked, hanging.asked) == (1, 1, 1)


@contextmanager
def waiting_calls() -> Iterator[tuple[str, threading.Event]]:
    """The address of a gRPC server that answers nothing, and whether it was asked."""
    asked, end = threading.Event(), threading.Event()

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(wait)

    def wait(message: bytes, context: grpc.ServicerContext) -> bytes:
        asked.set()
        end.wait(60)
        return b""

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", asked
    finally:
        end.set()
        server.stop(None).wait(20)


def test_a_client_that_leaves_is_logged_with_the_time_that_it_waited() -> None:
    model = Release(model="alone", version=1)
    with (
        serving(delay_s=30.0) as hanging,
        waiting_calls() as (address, asked),
        lone_gateway() as (gateway, port, host),
    ):
        place = Endpoint(http=hanging.address, grpc=address)
        gateway.apply(
            [ModelRoute(model="alone", epoch=1, stable=model)],
            {model.name: place},
            {"alone": Timeouts.from_spec(ServingSpec(request_timeout=60.0))},
        )
        wait_for("the routes", lambda: ask(port, "none") == 404, host, PROCESS_NAME)
        with socket.create_connection(("127.0.0.1", port)) as wire:
            head = b"POST /v2/models/alone/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n"
            wire.sendall(head + b'{"inputs": []}')
            wait_for("the request", lambda: hanging.asked == 1, host, PROCESS_NAME)
            time.sleep(0.2)  # what the client waits before it leaves
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            message = service_pb2.ModelInferRequest(model_name="alone").SerializeToString()
            call = channel.unary_unary(f"{SERVICE}/ModelInfer").future(message)
            assert asked.wait(20)
            call.cancel()
        wait_for("the log", lambda: len(read_requests(gateway.log).requests) == 2, host, PROCESS_NAME)
        first, second = read_requests(gateway.log).requests
    for line in (first, second):
        assert (line.cancelled, line.failed, line.us) == (True, False, None)
        assert line.waited_us is not None
    assert first.waited_us is not None
    assert first.waited_us >= 199_000
