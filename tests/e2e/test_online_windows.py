"""Windows that the gateway adds: a real Envoy asks the real step, a server behind it says what arrived."""

import asyncio
import http.client
import json
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2, service_pb2_grpc

from serin.errors import StateUnavailable
from serin.host.windows import plans_folder, windows_socket
from serin.serving.envoy.keys import KeyFile
from serin.serving.envoy.routes import Timeouts
from serin.serving.windows.server import serve
from serin.serving.windows.step import Step
from serin.store.artifacts import Endpoint, ModelRoute, Release
from serin.store.store import Store
from serin.watcher import metrics
from serin.watcher.event_keys import forget_events, kept_keys
from serin.windows.events import OnlineWindows
from serin.windows.lmdb_state import LmdbState
from serin.windows.state import MemoryState
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.kit.commands import serin
from tests.kit.waiting import until
from tests.kit.web import Handler, web_server
from tests.unit.serving import bundles
from tests.unit.windows.test_step import ask_json, plan, two_keys, windows_in

MODELS = ("pay", "other")
LENGTH = "inference-header-content-length"
SECOND = 1_000_000


class Echo(Handler):
    """Says which tensors arrived, and fails the first `failures` requests."""

    protocol_version = "HTTP/1.1"
    failures = answered = 0

    def do_POST(self) -> None:
        body = self.read_body()
        own = type(self)
        if own.failures:
            own.failures -= 1
            self.answer(b'{"error": "no"}', 503)
            return
        at, found = int(self.headers[LENGTH]), dict[str, Any]()
        for entry in json.loads(body[:at])["inputs"]:
            size = entry.get("parameters", {}).get("binary_data_size")
            if size is not None:
                found[entry["name"]] = struct.unpack(
                    "<q" if entry["datatype"] == "INT64" else "<f", body[at : at + size]
                )[0]
                at += size
            else:
                found[entry["name"]] = entry["data"]
        own.answered += 1
        self.answer(json.dumps(found).encode())


@contextmanager
def stepping(socket: Path, step: Step) -> Iterator[None]:
    """The step answers at the socket within the block."""
    loop, ended = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(socket, step.answer, ended),))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        assert not thread.is_alive(), "the step has not ended"
        loop.close()


class GrpcEcho(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Keeps the messages that arrived."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def ModelInfer(self, request: Any, context: Any) -> Any:
        self.messages.append(request)
        return service_pb2.ModelInferResponse(model_name=request.model_name)


@contextmanager
def grpc_server(servicer: GrpcEcho) -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait(30)


def apply(gateway: Any, **limits: Any) -> None:
    """Routes the models to the servers behind; `limits` are those of the first."""
    ports = [f"127.0.0.1:{port}" for port in gateway.behind]
    endpoint = Endpoint(http=ports[0], grpc=ports[1])
    releases = [Release(model=model, version=1) for model in MODELS]
    timeouts = {model: Timeouts(windows=plan().to_json()) for model in MODELS}
    gateway.apply(
        [ModelRoute(model=each.model, epoch=1, stable=each) for each in releases],
        {each.name: endpoint for each in releases},
        timeouts | {MODELS[0]: replace(timeouts[MODELS[0]], **limits)},
    )


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[tuple[Any, int, Step]]:
    (tmp_path / "plans").mkdir()
    for model in MODELS:
        (tmp_path / "plans" / f"{model}.json").write_bytes(plan().dump())
    state = LmdbState(tmp_path / "state")
    step = Step(tmp_path / "plans", lambda: state)
    echo = GrpcEcho()
    handler = type("Behind", (Echo,), {})  # its counters are of this test
    with (
        web_server(handler) as behind,
        grpc_server(echo) as grpc_behind,
        lone_gateway() as (gateway, port, host),
    ):
        gateway.behind, gateway.echo, gateway.handler = (behind, grpc_behind), echo, handler
        apply(gateway)
        wait_for("the route", lambda: ask(port, "pay", "first", "none", 1.0)[0] == 503, host)
        with stepping(gateway.inside.with_name("windows.sock"), step):
            wait_for("the step", lambda: ask(port, "pay", "x", "none", 1.0)[0] == 200, host)
            yield gateway, port, step
    state.close()


def post(port: int, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as wire:
        wire.request("POST", path, json.dumps(body), headers)
        answer = wire.getresponse()
        return answer.status, json.loads(answer.read() or b"null")


def json_inputs(event: str, card: str, amount: float, **more: Any) -> list[dict[str, Any]]:
    values = {"at": time.time_ns() // 1000, "id": event, "card": card, "amount": amount}
    kinds = {"at": "INT64", "id": "BYTES", "card": "BYTES", "amount": "FP32"}
    return [
        {"name": name, "datatype": kinds[name], "shape": [1, 1], "data": [value]}
        for name, value in {**values, **more}.items()
    ]


def ask(port: int, model: str, event: str, card: str, amount: float, **more: Any) -> tuple[int, Any]:
    return post(port, f"/v2/models/{model}/infer", {"inputs": json_inputs(event, card, amount, **more)})


def test_requests_get_their_windows_and_pushed_events_are_among_them(scene: tuple[Any, int, Step]) -> None:
    _, port, step = scene
    assert ask(port, "pay", "a", "c1", 1.5)[1]["n"] == 0
    event = {"id": "b", "at": time.time_ns() // 1000, "card": "c1", "amount": 2.5}
    assert post(port, "/v2/models/pay/events", {"events": [event, event]}) == (
        200,
        {"counted": 1, "repeated": 1},
    )
    assert ask(port, "pay", "c", "c1", 0.5) == (200, {"amount": [0.5], "n": 2, "spent": 4.0})
    assert ask(port, "other", "c", "c1", 0.5)[1]["n"] == 0
    assert step.counts["other"] == {"counted": 1}


def test_a_request_that_a_server_fails_and_another_try_answers_counts_once(
    scene: tuple[Any, int, Step],
) -> None:
    gateway, port, _ = scene
    gateway.handler.failures = 1
    assert ask(port, "pay", "a", "c2", 1.0)[0] == 200
    assert ask(port, "pay", "b", "c2", 1.0)[1]["n"] == 1


def test_both_arms_of_a_canary_get_the_windows_of_one_state_and_count_each_event_once(
    scene: tuple[Any, int, Step],
) -> None:
    gateway, port, step = scene
    stable, candidate = (Release(model="pay", version=version) for version in (1, 2))
    other = type("Candidate", (Echo,), {})
    with web_server(other) as behind:
        endpoints = {
            stable.name: Endpoint(
                http=f"127.0.0.1:{gateway.behind[0]}", grpc=f"127.0.0.1:{gateway.behind[1]}"
            ),
            candidate.name: Endpoint(http=f"127.0.0.1:{behind}", grpc=f"127.0.0.1:{gateway.behind[1]}"),
        }
        route = ModelRoute(model="pay", epoch=2, stable=stable, candidate=candidate, candidate_percent=50.0)
        gateway.apply([route], endpoints, {"pay": Timeouts(windows=plan().to_json())})
        until(lambda: ask(port, "pay", "x", "none", 1.0)[0] == 200 and other.answered, "both arms answer")
        before = step.counts["pay"]["counted"]
        of_stable, of_candidate = gateway.handler.answered, other.answered
        found = [ask(port, "pay", f"e{event // 2}", "c6", 1.0)[1]["n"] for event in range(60)]
        assert step.counts["pay"]["counted"] - before == 60  # no two have one time
        assert found == list(range(60))
        assert min(gateway.handler.answered - of_stable, other.answered - of_candidate) > 0
        other.failures = 60
        found = [ask(port, "pay", f"failed {event}", "c6", 1.0)[1]["n"] for event in range(20)]
        assert found == list(range(60, 80))
        assert other.failures < 60
        assert step.counts["pay"]["counted"] - before == 80


def test_calls_of_grpc_and_bodies_without_a_length_get_their_windows(scene: tuple[Any, int, Step]) -> None:
    gateway, port, _ = scene
    assert ask(port, "pay", "a", "c5", 1.5)[1]["n"] == 0
    client = InferenceServerClient(f"127.0.0.1:{port}")
    dtypes = {"at": (np.int64, time.time_ns() // 1000), "id": (object, "b"), "card": (object, "c5")}
    inputs = []
    for name, (dtype, value) in {**dtypes, "amount": (np.float32, 2.5)}.items():
        kind = {np.int64: "INT64", object: "BYTES", np.float32: "FP32"}[dtype]
        inputs.append(InferInput(name, [1, 1], kind))
        inputs[-1].set_data_from_numpy(np.array([[value]], dtype))
    try:
        client.infer("pay", inputs)
    finally:
        client.close()
    (message,) = gateway.echo.messages
    sent = dict(zip([each.name for each in message.inputs], message.raw_input_contents, strict=True))
    assert sent == {
        "amount": struct.pack("<f", 2.5),
        "n": struct.pack("<q", 1),
        "spent": struct.pack("<f", 1.5),
    }
    body = json.dumps({"inputs": json_inputs("c", "c5", 0.5)}).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as wire:
        pieces = (body[at : at + 40] for at in range(0, len(body), 40))
        wire.request("POST", "/v2/models/pay/infer", pieces, {"content-type": "application/json"})
        assert json.loads(wire.getresponse().read())["n"] == 2


def test_a_request_that_a_rate_limit_refuses_is_not_counted(scene: tuple[Any, int, Step]) -> None:
    gateway, port, _ = scene
    apply(gateway, rate_limit="1/h", rate_burst=3)
    found: list[int] = []

    def limited() -> bool:
        found.append(ask(port, "pay", f"{len(found)}", "c4", 1.0)[0])
        return found[-1] == 429

    until(limited, "a request is refused")
    refused = [ask(port, "pay", f"more {n}", "c4", 1.0)[0] for n in range(3)]
    assert refused == [429] * 3
    answered = len(found) - 1
    apply(gateway)
    until(
        lambda: ask(port, "pay", "", "", 1.0)[0] == 200, "the limit is gone"
    )  # without a key it is no event
    assert ask(port, "pay", "last", "c4", 1.0)[1]["n"] == answered


def test_a_time_in_the_future_is_refused_at_the_gateway(scene: tuple[Any, int, Step]) -> None:
    _, port, _ = scene
    status, answer = ask(port, "pay", "a", "c3", 1.0, at=time.time_ns() // 1000 + 3600 * SECOND)
    assert status == 400
    assert "in the future" in answer["error"]


def test_prometheus_gets_what_became_of_events_and_how_long_windows_took(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    assert list(metrics.events(home)) == []
    plans_folder(home).mkdir(parents=True)
    (plans_folder(home) / "pay.json").write_bytes(plan().dump())
    (down,) = metrics.events(home)
    assert [sample.value for sample in down.samples] == [0.0]
    step = Step(plans_folder(home), MemoryState)
    with stepping(windows_socket(home), step):
        until(windows_socket(home).exists, "the step")
        for event, at in (("a", 0), ("a", 0), ("b", -20 * SECOND), ("c", 3600 * SECOND)):
            ask_json(step, event, time.time_ns() // 1000 // SECOND * SECOND + at, 1.0)
        found = {
            (sample.name, sample.labels.get("outcome") or sample.labels.get("le")): sample.value
            for family in metrics.events(home)
            for sample in family.samples
        }
    outcomes = {name: value for (metric, name), value in found.items() if metric == "serin_events_total"}
    assert outcomes == {"counted": 1, "repeated": 1, "late": 1, "refused": 1}
    assert found["serin_events_available", None] == found["serin_events_keys", None] == 1
    assert found["serin_windows_seconds_count", None] == found["serin_windows_seconds_bucket", "+Inf"] == 4


def test_events_go_with_the_recorded_rows_of_their_keys(tmp_path: Path) -> None:
    home = tmp_path / "home"
    plans_folder(home).mkdir(parents=True)
    (plans_folder(home) / "pay.json").write_bytes(plan().dump())
    step, now = Step(plans_folder(home), MemoryState), time.time_ns() // 1000
    rows = pa.table({"card": ["c1", "c1", None], "_row": [0, 1, 2]})
    with pytest.raises(StateUnavailable):
        forget_events(home, "pay", "card = 'c1'")(1, rows)
    with stepping(windows_socket(home), step):
        until(windows_socket(home).exists, "the step")
        for card in ("c1", "c2"):
            ask_json(step, "a", now, 1.0, card=card)
        forget_events(home, "pay", "amount > 1")(1, rows)  # may hold for some events of the card only
        forget_events(home, "other", "card = 'c1'")(1, rows)
        assert windows_in(ask_json(step, "x", now + 1, 1.0, card="c1"))["n"] == 1
        assert forget_events(home, "pay", "card = 'c1'")(1, rows) == 0
        assert windows_in(ask_json(step, "b", now + 1, 1.0, card="c1"))["n"] == 0
        assert windows_in(ask_json(step, "b", now + 1, 1.0, card="c2"))["n"] == 1
    (unrecorded,) = kept_keys(home, "pay", "card = 'c1'", ["_row"])
    assert (
        "windows by card stay: card is not recorded; use `serin events forget pay card=VALUE`" in unrecorded
    )
    (mixed,) = kept_keys(home, "pay", "card = 'c1' and amount > 1", ["card", "amount"])
    assert "windows by card stay: the condition may hold for some" in mixed
    assert kept_keys(home, "pay", "card = 'c1'", ["card"]) == []


def test_a_key_is_forgotten_in_the_windows_of_all_versions_and_the_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, store = tmp_path / "home", Store(str(tmp_path / "store"))
    monkeypatch.setenv("SERIN_HOME", str(home))
    monkeypatch.setenv("SERIN_STORE", str(tmp_path / "store"))
    plans, now, state = (two_keys(), plan(span_s=3600)), time.time_ns() // 1000, MemoryState()
    for each in plans:
        bundles.publish(store, bias=0.0, model="pay", extra={"windows.json": each.dump()})
    plans_folder(home).mkdir(parents=True)
    (plans_folder(home) / "pay.json").write_bytes(plans[0].dump())

    def counts(at: int) -> list[dict[str, Any]]:
        row = {"id": [str(at)], "at": [at], "card": ["c1"], "shop": ["s1"], "amount": [1.0]}
        return [OnlineWindows("pay", each, state).answer(row, [at]).columns for each in plans]

    counts(now)
    with stepping(windows_socket(home), Step(plans_folder(home), lambda: state)):
        until(windows_socket(home).exists, "the step")
        said = serin("events", "forget", "pay", "card=c1", "--yes")
    assert "deleted the events of 2 keys" in said
    assert "windows by card, shop are not by this key: their events stay" in said
    assert "windows by shop are not by this key: their events stay" in said
    first, second = counts(now + 1)
    assert (first["n"], first["at_shop"], first["pair"], second["n"]) == ([0], [1], [1], [0])


def test_a_key_of_one_model_pushes_no_events_to_another(scene: tuple[Any, int, Step]) -> None:
    gateway, port, _ = scene
    file = KeyFile(path=gateway.keys._file.path, published=gateway.keys._file.published)
    _, key = file.create("cash", models=["other"])
    gateway.keys.follow()
    event = {"events": [{"id": "b", "at": time.time_ns() // 1000, "card": "c1", "amount": 2.5}]}
    assert post(port, "/v2/models/pay/events", event, key)[0] == 403
    assert post(port, "/v2/models/pay/events", event)[0] == 401
    assert post(port, "/v2/models/other/events", event, key) == (200, {"counted": 1})
