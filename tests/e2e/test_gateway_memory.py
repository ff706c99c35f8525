"""How much and how long a gateway takes: many slow requests with large bodies, and requests that take too long."""

import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import h2.config
import h2.connection
import h2.events
import psutil
import pytest
from tritonclient.grpc import service_pb2

from serin.formats.serving.request_log import read_requests
from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.serving.envoy.routes import Timeouts
from serin.spec.objectives import ObjectivesSpec
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.e2e.test_gateway_limits import INFER, lead_to
from tests.fakes.kserve import serving
from tests.kit import web
from tests.kit.web import answers

MB = 1 << 20
LIMIT_MB = 100
BODY_MB = 31  # of 32 that are announced: the last one never comes
PIECE = bytes(MB)


def announce(port: int) -> socket.socket:
    wire = socket.create_connection(("127.0.0.1", port), timeout=60)
    wire.sendall(f"POST {INFER} HTTP/1.1\r\nhost: x\r\ncontent-length: {32 * MB}\r\n\r\n".encode())
    return wire


def send_slowly(wire: socket.socket) -> str:
    """All but the end of the body; the status of the answer that comes before, `reset`, or `held`."""
    try:
        for _ in range(BODY_MB):
            wire.sendall(PIECE)
    except OSError:
        pass
    readable, _, _ = select.select([wire], [], [], 0.5)
    try:
        return wire.recv(12)[9:].decode() or "reset" if readable else "held"
    except ConnectionResetError:
        return "reset"


def send_streams(port: int, count: int) -> str:
    """The same by HTTP/2, on one connection: what came of the first stream that ended."""
    state = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    fixed = {":method": "POST", ":scheme": "http", ":path": INFER, ":authority": "x"}
    with socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
        state.initiate_connection()
        left: dict[int, int] = {}
        for stream in range(1, 2 * count, 2):
            state.send_headers(stream, [*fixed.items(), ("content-length", str(32 * MB))])
            left[stream] = BODY_MB * MB
        while any(left.values()):
            for stream, bytes_left in left.items():
                size = min(bytes_left, state.local_flow_control_window(stream), state.max_outbound_frame_size)
                if size:
                    state.send_data(stream, PIECE[:size])
                    left[stream] -= size
            try:
                data = state.data_to_send()
                wire.sendall(data)
                if data and not select.select([wire], [], [], 0)[0]:
                    continue
                received = wire.recv(65536)
            except ConnectionResetError:
                return "reset"
            for event in state.receive_data(received):
                if isinstance(event, h2.events.ResponseReceived):
                    return str(dict(event.headers or ())[":status"])
                if isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
                    return "reset"
    return "held"


@contextmanager
def peak_of(pid: int) -> Iterator[list[int]]:
    """The most megabytes that the process takes within the block, in a list of one."""
    process, done, peak = psutil.Process(pid), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], process.memory_info().rss // MB)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield peak
    finally:
        done.set()
        watching.join(10)


@pytest.mark.parametrize("protocol", ["HTTP/1.1", "HTTP/2"])
def test_slow_large_requests_end_in_refusals_and_the_gateway_keeps_to_its_memory(protocol: str) -> None:
    with lone_gateway(max_heap_bytes=LIMIT_MB * MB, max_connections=100) as (gateway, port, host):
        lead_to(gateway)
        pid = host.pid(PROCESS_NAME)
        assert pid
        wait_for("the gateway", lambda: answers(port, "/v2/health/live"), host)
        before = psutil.Process(pid).memory_info().rss // MB
        with peak_of(pid) as peak:
            if protocol == "HTTP/2":
                ends = Counter([send_streams(port, 10)])
            else:
                wires = [announce(port) for _ in range(16)]
                with ThreadPoolExecutor(len(wires)) as senders:
                    ends = Counter(senders.map(send_slowly, wires))
                wait_for("room, while the others are held", lambda: answers(port, "/v2/health/live"), host)
                for wire in wires:
                    wire.close()
        print(
            f"{protocol}: {dict(ends)}, {before} MB before, at most {peak[0]} MB, limit {LIMIT_MB} MB of heap"
        )
        refused = sum(ends.values()) - ends["held"]
        assert set(ends) <= {"503", "408", "reset", "held"}
        assert refused >= 1
        assert peak[0] < before + 2 * LIMIT_MB, "what comes between two looks is on top of the limit"
        wait_for("room", lambda: answers(port, "/v2/health/live"), host)
        assert host.pid(PROCESS_NAME) == pid


SLOW_S = 1.6  # longer than a second try would wait, whatever it is derived from


def ask(port: int, model: str) -> int:
    return web.ask(port, f"/v2/models/{model}/infer", {"inputs": []}, timeout_s=60.0).status


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
            "alone": Timeouts.from_spec(ServingSpec(request_timeout=30.0), ObjectivesSpec()),
            "split": Timeouts.from_spec(ServingSpec(request_timeout=2.8), ObjectivesSpec()),
        }
        gateway.apply(routes, places, limits)
        wait_for("the routes", lambda: ask(port, "none") == 404, host)
        with ThreadPoolExecutor(2) as both:
            assert list(both.map(lambda model: ask(port, model), ("alone", "split"))) == [200, 200]
        wait_for("the log", lambda: len(read_requests(gateway.log).requests) == 2, host)
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
            {"alone": Timeouts.from_spec(ServingSpec(request_timeout=60.0), ObjectivesSpec())},
        )
        wait_for("the routes", lambda: ask(port, "none") == 404, host)
        with socket.create_connection(("127.0.0.1", port)) as wire:
            head = b"POST /v2/models/alone/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n"
            wire.sendall(head + b'{"inputs": []}')
            wait_for("the request", lambda: hanging.asked == 1, host)
            time.sleep(0.2)  # what the client waits before it leaves
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            message = service_pb2.ModelInferRequest(model_name="alone").SerializeToString()
            call = channel.unary_unary(f"{SERVICE}/ModelInfer").future(message)
            assert asked.wait(20)
            call.cancel()
        wait_for("the log", lambda: len(read_requests(gateway.log).requests) == 2, host)
        first, second = read_requests(gateway.log).requests
    for line in (first, second):
        assert (line.cancelled, line.failed, line.us) == (True, False, None)
        assert line.waited_us is not None
    assert first.waited_us is not None
    assert first.waited_us >= 199_000
