"""The compiled load generator of the serving benchmark, against servers that count what they answer."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from benchmarks.serving.load.generator import build_generator, run_generator
from serin.machine.ports import free_ports
from serin.serving.client.address import Address
from serin.serving.native.compiler import machine_compiler
from tests.kit.load import INFER_METHOD, GrpcTarget, json_target
from tests.unit.serving.pausing_server import serving

pytestmark = pytest.mark.skipif(machine_compiler() is None, reason="no C++ compiler on PATH")

SMALL, LARGE = b"few bytes", bytes(300_000)  # more than a window of HTTP/2 and many frames


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_generator(tmp_path_factory.mktemp("load"))


@contextmanager
def grpc_server(*, refuses: bool = False) -> Iterator[tuple[str, list[bytes]]]:
    """A server of gRPC that answers with the message itself, or refuses, and keeps what it got."""
    got: list[bytes] = []

    def answer(message: bytes, context: grpc.ServicerContext) -> bytes:
        got.append(message)
        if refuses:
            context.abort(grpc.StatusCode.UNAVAILABLE, "refused")
        return message

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            return grpc.unary_unary_rpc_method_handler(answer) if details.method == INFER_METHOD else None

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", got
    finally:
        server.stop(None).wait()


def test_every_answer_over_http_is_counted_once(program: Path) -> None:
    with serving() as server:
        result = run_generator(
            program, json_target(server.url, "/score", [{"n": 1}]), clients=3, seconds=0.3, warm_up_s=0.1
        )
        assert result.failed == 0
        assert 0 < result.good < result.all_requests == server.answered
    assert 0 < result.p50_ms <= result.p99_ms < 1000


@pytest.mark.parametrize("message", [SMALL, LARGE], ids=["small", "large"])
def test_messages_over_grpc_arrive_whole_and_their_answers_are_counted(program: Path, message: bytes) -> None:
    with grpc_server() as (url, got):
        target = GrpcTarget(address=Address.parse(url), requests=(message,))
        result = run_generator(program, target, clients=2, seconds=0.3)
    assert result.failed == 0
    assert result.good == result.all_requests == len(got) > 2
    assert set(got) == {message}


def test_a_call_that_is_refused_is_a_failure(program: Path) -> None:
    with grpc_server(refuses=True) as (url, _):
        target = GrpcTarget(address=Address.parse(url), requests=(SMALL,))
        result = run_generator(program, target, clients=2, seconds=0.1)
    assert result.good == 0 < result.failed


def test_a_port_where_nobody_listens_is_a_failure(program: Path) -> None:
    target = json_target(f"127.0.0.1:{free_ports(1)[0]}", "/score", [{"n": 1}])
    assert run_generator(program, target, clients=1, seconds=0.1).failed == 1
