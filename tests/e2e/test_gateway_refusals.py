"""What the gateway refuses: paths and calls that could change or reveal a server, and requests that are malformed."""

import json
import random
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from serin.serving.envoy.api_types import SERVICE
from serin.serving.envoy.fixed_routes import NO_ROUTES
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.serving.triton.installation import find_triton
from serin.store.artifacts import Endpoint, ModelRoute, Release
from tests.e2e.fuzz_gateway import Http2
from tests.e2e.fuzz_requests import GrpcCall, framed, good_frame
from tests.e2e.reset_clients import Resetter, give_up_calls, memory, padded_frame
from tests.e2e.serving_host import ChildHost, wait_for
from tests.e2e.serving_stack import NO_SUCH, Stack, built_filter, good_inputs, start_gateway
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA, infer_inputs

CARES = "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig"
ONLY_MODELS = "this gateway answers inference, readiness and metadata of models, and nothing else"


CONTROL_PATHS = [
    ("POST", "/v2/repository/index"),
    ("POST", f"/v2/repository/models/{MODEL}/load"),
    ("POST", f"/v2/repository/models/{MODEL}/unload"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("GET", f"/v2/models/{MODEL}/trace/setting"),
    ("POST", f"/v2/models/{MODEL}/trace/setting"),
    ("GET", f"/v2/models/{MODEL}/versions/1/trace/setting"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/models/stats"),
    ("GET", f"/v2/models/{MODEL}/stats"),
    ("GET", f"/v2/models/{MODEL}/versions/1/stats"),
    ("GET", f"/v2/models/{MODEL}/config"),
    ("GET", "/metrics"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/x/register"),
    ("POST", "/v2/cudasharedmemory/region/x/register"),
    ("POST", f"/v2/models/{MODEL}/generate"),
    # the same by other spellings
    ("POST", "/v2//repository//index"),
    ("POST", "//v2/repository/index"),
    ("POST", "/v2/models/../repository/index"),
    ("POST", "/v2/./repository/./index"),
    ("POST", "/v2/%72epository/index"),
    ("POST", "/v2/models/%2e%2e/repository/index"),
    ("GET", f"/v2/models/{MODEL}/infer/../config"),
    ("GET", f"/v2/models/{MODEL}/ready/..//stats"),
    ("GET", f"/v2/models/{MODEL}/infer/"),
    ("GET", f"/v2/models/{MODEL}/confi%67"),
    ("GET", f"/v2/models/{MODEL}%00/config"),
    ("GET", f"/v2/models/{MODEL};/config"),
    ("GET", f"/v2/models/{MODEL}/ready#/config"),
    ("POST", f"/V2/models/{MODEL}/infer"),
    ("POST", "/v2/REPOSITORY/INDEX"),
    ("GET", f"/v2/Models/{MODEL}/CONFIG"),
    ("POST", f"/v2/models/{MODEL}\\..\\..\\repository/index"),
]


@pytest.mark.parametrize(("method", "path"), CONTROL_PATHS, ids=lambda value: str(value))
def test_a_path_that_is_not_allowed_is_refused_by_the_gateway(stack: Stack, method: str, path: str) -> None:
    status, answer = stack.ask(method, path, b"{}" if method == "POST" else None)
    assert status in (400, 404)
    assert answer in ({"error": ONLY_MODELS}, {"error": NO_SUCH}, {"error": ""}, "")


@pytest.fixture(scope="module")
def http2(stack: Stack) -> Iterator[httpx.Client]:
    """Plain HTTP/2, spoken from the first byte on."""
    with httpx.Client(http1=False, http2=True, base_url=f"http://{stack.url}", timeout=20) as client:
        yield client


@pytest.mark.parametrize(("method", "path"), CONTROL_PATHS, ids=lambda value: str(value))
def test_the_same_path_is_refused_over_plain_http_2(http2: httpx.Client, method: str, path: str) -> None:
    raw = {"target": path.encode()}  # as it is: the library would tidy it up
    answer = http2.request(method, "/", content=b"{}" if method == "POST" else None, extensions=raw)
    assert answer.http_version == "HTTP/2"
    assert answer.status_code in (400, 404)
    texts = (ONLY_MODELS, NO_SUCH, "")
    assert answer.text in (*texts, *(f'{{"error":"{words}"}}\n' for words in texts))


CALLS = [
    "RepositoryIndex",
    "RepositoryModelLoad",
    "ModelStatistics",
    "TraceSetting",
    "LogSettings",
    "ModelConfig",
]
SPELLINGS = [
    "/{0}", "//inference.GRPCInferenceService/{0}", "/x/../inference.GRPCInferenceService/{0}",
    "/inference.GRPCInferenceService/./{0}", "/INFERENCE.GRPCINFERENCESERVICE/{0}",
    "/inference.GRPCInferenceService//{0}", "/inference%2eGRPCInferenceService/{0}",
    "/inference.GRPCInferenceService%2f{0}", "/inference.GRPCInferenceService/{0}?x",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_call_by_another_spelling_is_refused_too(stack: Stack, call: str) -> None:
    client, headers = Http2(stack.port), {"content-type": "application/grpc", "te": "trailers"}
    for spelling in (*SPELLINGS, f"/inference.GRPCInferenceService/{call.upper()}"):
        status, words = client.call(GrpcCall(spelling.format(call), framed(b""), headers))
        assert (status, words) == ("12", ONLY_MODELS) or status in ("13", "http 400", "reset"), (
            spelling,
            status,
        )
        if status == "13":
            assert words == "", "Envoy's own: a path that it will not read"
    client.close()


def test_triton_and_the_gateway_listen_on_the_loopback_interface_alone(stack: Stack) -> None:
    for name, count in ((PROCESS_NAME, 1), (stack.stable.name, 3), (stack.candidate.name, 3)):
        found = psutil.Process(stack.host.pid(name)).net_connections("inet")
        listening = {entry.laddr for entry in found if entry.status == psutil.CONN_LISTEN}
        assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
        assert len(listening) == count, listening


@pytest.mark.parametrize(
    "path", [f"/v2/models/{MODEL}%2Fconfig", "/v2%2frepository%2findex", "/v2/repository%5Cindex"]
)
def test_an_escaped_slash_is_a_bad_request(stack: Stack, path: str) -> None:
    assert stack.ask("POST", path, b"{}")[0] in (400, 404)


GRPC_CONTROL: dict[str, Callable[[Any], Any]] = {
    "repository index": lambda client: client.get_model_repository_index(),
    "load": lambda client: client.load_model(MODEL),
    "unload": lambda client: client.unload_model(MODEL),
    "trace, global": lambda client: client.get_trace_settings(),
    "trace, of a model": lambda client: client.update_trace_settings(MODEL, {"trace_level": ["TENSORS"]}),
    "logging": lambda client: client.update_log_settings({"log_verbose_level": 1}),
    "statistics": lambda client: client.get_inference_statistics(MODEL),
    "config": lambda client: client.get_model_config(MODEL),
    "server metadata": lambda client: client.get_server_metadata(),
    "shared memory status": lambda client: client.get_system_shared_memory_status(),
    "shared memory": lambda client: client.register_system_shared_memory("x", "/x", 8),
    "cuda shared memory": lambda client: client.register_cuda_shared_memory("x", b"", 0, 8),
}


@pytest.mark.parametrize("name", GRPC_CONTROL)
def test_a_grpc_call_that_is_not_allowed_is_refused_by_the_gateway(stack: Stack, name: str) -> None:
    with tritonclient.grpc.InferenceServerClient(stack.url) as client:
        with pytest.raises(InferenceServerException, match=ONLY_MODELS) as refused:
            GRPC_CONTROL[name](client)
        assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


def test_behind_the_gateway_triton_itself_refuses_what_is_not_inference(stack: Stack) -> None:
    inside = stack.releases.endpoint(stack.stable)
    for library, address in ((tritonclient.http, inside.http), (tritonclient.grpc, inside.grpc)):
        client = library.InferenceServerClient(address)
        for call in (
            client.get_model_repository_index,
            client.get_log_settings,
            client.get_inference_statistics,
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                call()
        client.close()


def test_streams_and_compressed_requests_are_refused_in_words(stack: Stack) -> None:
    answered: list[Any] = []
    arrived = threading.Event()
    with tritonclient.grpc.InferenceServerClient(stack.url) as client:
        client.start_stream(lambda result, error: (answered.append(error), arrived.set()))
        assert arrived.wait(10)
        client.stop_stream(cancel_requests=True)
        assert "streams are not served here" in str(answered[0])
        with pytest.raises(InferenceServerException, match="compressed messages are not accepted"):
            client.infer(
                MODEL, infer_inputs(tritonclient.grpc, bundles.rows(64), SCHEMA), compression_algorithm="gzip"
            )
    refused = pytest.raises(InferenceServerException, match="compressed requests are not accepted")
    with tritonclient.http.InferenceServerClient(stack.url) as http, refused:
        http.infer(
            MODEL,
            infer_inputs(tritonclient.http, bundles.rows(1), SCHEMA),
            request_compression_algorithm="gzip",
        )


def test_a_gateway_without_models_answers_in_words() -> None:
    host = ChildHost()
    folder = Path(tempfile.mkdtemp(prefix="serin-e2e-"))
    try:
        gateway, port = start_gateway(folder, host)
        bare = Stack(folder, None, host, None, gateway, port, None, None)  # type: ignore[arg-type]
        _is_not_ready(bare, NO_ROUTES)
        gateway.apply([], {}, missing=[MODEL])
        _is_not_ready(bare, f"no release answers yet for {MODEL}")
        gateway.apply([], {})
        assert bare.ask("POST", f"/v2/models/{MODEL}/infer", b"{}") == (404, {"error": NO_SUCH})
        assert bare.ask("GET", "/") == (404, {"error": ONLY_MODELS})
        assert bare.ask("GET", "/v2/health/ready")[0] == 200
        with tritonclient.grpc.InferenceServerClient(bare.url) as client:
            assert client.is_server_ready()
            with pytest.raises(InferenceServerException, match=NO_SUCH) as unknown:
                client.infer(MODEL, infer_inputs(tritonclient.grpc, bundles.rows(1), SCHEMA))
            assert unknown.value.status() == "StatusCode.NOT_FOUND"
        gateway.apply([], {}, missing=[MODEL])  # later, which other models do not pay for
        assert bare.ask("GET", "/v2/health/ready")[0] == 200
        assert bare.ask("GET", f"/v2/models/{MODEL}/ready")[0] == 503
        _restarted_is_ready_and_started_is_not(bare)
    finally:
        host.stop_all()
        shutil.rmtree(folder)


def _is_not_ready(bare: Stack, why: str) -> None:
    """A client gets the advice to come back, not the answer that there is no such model."""
    assert bare.ask("GET", "/v2/health/live")[0] == 200
    assert bare.ask("GET", "/v2/health/ready") == (503, {"error": why})
    for path in ("infer", "ready"):
        assert bare.ask("POST" if path == "infer" else "GET", f"/v2/models/{MODEL}/{path}", b"{}")[0] == 503
    with tritonclient.grpc.InferenceServerClient(bare.url) as client:
        assert client.is_server_live()
        assert not client.is_server_ready()
        with pytest.raises(InferenceServerException) as unknown:
            client.infer(MODEL, infer_inputs(tritonclient.grpc, bundles.rows(1), SCHEMA))
        assert unknown.value.status() == "StatusCode.UNAVAILABLE"


def _restarted_is_ready_and_started_is_not(bare: Stack) -> None:
    """A gateway that was killed has the routes that were in force; one that is started again has old ones."""
    for fresh in (False, True):
        bare.host.stop(PROCESS_NAME)
        if fresh:
            bare.gateway.write_bootstrap(bare.port, request_filter=built_filter())
        bare.host.start(bare.gateway.process())
        wait_for("Envoy", bare.gateway.ready, bare.host)
        assert bare.ask("GET", "/v2/health/ready")[0] == (503 if fresh else 200)


def test_a_gateway_does_not_wait_for_the_names_of_other_hosts(tmp_path: Path) -> None:
    """A name server that is silent must not keep a restarted gateway from its models on this machine."""
    host, names = ChildHost(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind(("127.0.0.1", 0))
    server = {"socket_address": {"address": "127.0.0.1", "port_value": names.getsockname()[1]}}
    resolver = {
        "name": "envoy.network.dns_resolver.cares",
        "typed_config": {"@type": CARES, "resolvers": [server]},
    }
    expert = tmp_path / "envoy.json"
    expert.write_text(json.dumps({"bootstrap": {"typed_dns_resolver_config": resolver}}))
    folder = Path(tempfile.mkdtemp(prefix="serin-e2e-"))
    try:
        gateway, port = start_gateway(folder, host, expert=expert)
        bare = Stack(folder, None, host, None, gateway, port, None, None)  # type: ignore[arg-type]
        away = Endpoint(http="elsewhere.example:80", grpc="elsewhere.example:81", elsewhere=True)
        release = Release(model=MODEL, version=1)
        gateway.apply([ModelRoute(model=MODEL, epoch=1, stable=release)], {release.name: away})
        host.stop(PROCESS_NAME)
        host.start(gateway.process())
        wait_for("Envoy", gateway.ready, host, within_s=30)
        assert bare.ask("GET", "/v2/health/live")[0] == 200
        names.setblocking(False)
        assert names.recv(1000), "it was asked"
    finally:
        host.stop_all()
        names.close()
        shutil.rmtree(folder)


# malformed requests


def changed(name: str, **change: Any) -> list[dict[str, Any]]:
    return [{**tensor, **change} if tensor["name"] == name else tensor for tensor in good_inputs()]


MALFORMED = {
    "a column is missing": (
        [tensor for tensor in good_inputs() if tensor["name"] != "temp"],
        r"missing.*'temp'",
    ),
    "a column of another type": (changed("distance", datatype="FP32"), "distance"),
    "a column of another shape": (changed("carrier", shape=[1, 2], data=["a", "b"]), "carrier"),
    "more rows in one column": (changed("night", shape=[2, 1], data=[0, 1]), "night|batch size"),
    "fewer values than rows": (changed("carrier", shape=[2, 1]), "carrier"),
    "a bool that is none": (changed("night", data=[5]), "night.*row 0 is 5"),
    "a column nobody knows": (
        [*good_inputs(), {"name": "zz", "datatype": "FP32", "shape": [1, 1], "data": [1]}],
        "zz",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_gets_a_400_that_names_the_column(stack: Stack, name: str) -> None:
    epoch = stack.route(100)  # to the candidate: what a client did wrong must not be tried again elsewhere
    inputs, words = MALFORMED[name]
    status, answer = stack.ask("POST", f"/v2/models/{MODEL}/infer", {"inputs": inputs})
    assert status == 400
    assert re.search(words, answer["error"]), answer
    assert "/" not in answer["error"], "a path"
    assert [line.attempts for line in stack.logged(epoch, 1)] == [1]


def test_text_for_a_number_is_refused_at_the_gateway_with_its_place(stack: Stack) -> None:
    body = {"inputs": changed("temp", data=["warm"])}
    status, answer = stack.ask("POST", f"/v2/models/{MODEL}/infer", body)
    assert (status, answer["error"]) == (400, "input 'temp', data[0]: \"warm\" is not a number")


def test_nothing_that_ended_triton_reaches_it(stack: Stack) -> None:
    """Each of these ends Triton 2.51, or takes all memory, when it is handed on."""
    pids = {name: stack.host.pid(name) for name in (stack.stable.name, stack.candidate.name)}
    good = json.dumps({"inputs": good_inputs()})
    nested = good.replace("[0.5]", "[" * 500_000 + "]" * 500_000)
    for body, words in (
        ("[" * 1_000_000, "nested too deeply"),
        ('{"a":' * 300_000, "nested too deeply"),
        (nested, "nested too deeply"),
        (good.replace('"shape": [1', '"shape" : [ 4000000000'), "claims more elements"),
        (good.replace('"shape": [1', '"shape": [-1'), "claims more elements"),
        (good.replace('"shape": [1', '"shape":[4e9'), "claims more elements"),
        (good.replace('"shape": [1', '"sh\\u0061pe": [4000000000'), "plain letters"),
    ):
        status, answer = stack.ask("POST", f"/v2/models/{MODEL}/infer", body.encode())
        assert (status, words in str(answer)) == (400, True), answer
    large = json.dumps({"inputs": changed("temp", shape=[4_000_000_000, 1])}).encode()
    for length in ("1e0", "-1", "0x1", str(len(large) + 1), "1, 2"):
        header = {"inference_header_content_length": length}
        assert stack.ask("POST", f"/v2/models/{MODEL}/infer", large, **header)[0] == 400
    text = json.dumps({"inputs": changed("carrier", data=['a \\u0061 and a "shape": [9999999999] ü'])})
    assert stack.ask("POST", f"/v2/models/{MODEL}/infer", text.encode())[0] == 200, "only text"
    assert {name: stack.host.pid(name) for name in pids} == pids


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'{"inputs": 3}'])
def test_a_body_that_is_not_a_request_gets_a_400(stack: Stack, body: bytes) -> None:
    assert stack.ask("POST", f"/v2/models/{MODEL}/infer", body)[0] == 400


# clients that give up


def test_calls_that_are_given_up_end_nothing(stack: Stack) -> None:
    """One in a few hundred would: Triton 2.51 dies of a cancellation that meets its answer."""
    if find_triton().cancel_guard is None:
        pytest.skip("Triton has no gRPC cancel guard here: it was installed without a C++ compiler")
    pids = {release: stack.host.pid(release.name) for release in (stack.stable, stack.candidate)}
    waits = random.Random(7)
    with grpc.insecure_channel(stack.url) as channel:
        call = channel.unary_unary(f"{SERVICE}/ModelInfer")
        given_up = 0
        for _ in range(1500):
            asked = call.future(good_frame()[5:])
            time.sleep(waits.uniform(0.0, 0.003))
            given_up += asked.cancel()
        print(f"{given_up} of 1500 calls given up")
        assert call(good_frame()[5:], timeout=20)
    assert given_up > 100
    assert {release: stack.host.pid(release.name) for release in pids} == pids


def test_calls_that_are_reset_at_any_moment_leave_no_memory_behind(stack: Stack) -> None:
    """At Triton itself on a connection that stays open, in the middle of 600 KB; and through the gateway at every
    moment, on connections that close. `make soak` resets 10,000."""
    if find_triton().cancel_guard is None:
        pytest.skip("Triton has no gRPC cancel guard here: it was installed without a C++ compiler")
    pids = {release: stack.host.pid(release.name) for release in (stack.stable, stack.candidate)}
    direct = int(stack.endpoints()[stack.stable.name].grpc.rpartition(":")[2])
    client, held = Resetter(direct, random.Random(7)), []
    try:
        for _ in range(2):
            for _ in range(100):
                client.give_up(padded_frame(600_000), "in body")
            client.settle()
            held.append(memory(stack, stack.stable))
    finally:
        client.close()
    seen = give_up_calls(stack.port, 100, number=7, frame=good_frame())
    after = memory(stack, stack.stable)
    print(f"after 100 and 200 resets: {held}; after {dict(seen)} more: {after}")
    assert held[1].triton < held[0].triton + 15
    assert after.triton < held[1].triton + 15
    assert {release: stack.host.pid(release.name) for release in pids} == pids
