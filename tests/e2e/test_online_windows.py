"""Windows that the gateway adds: a real Envoy asks the real step, a server behind it says what arrived."""

import asyncio
import http.client
import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from serin.serving.envoy.keys import KeyFile
from serin.serving.envoy.routes import Timeouts
from serin.serving.windows.server import serve
from serin.serving.windows.step import Step
from serin.store.artifacts import Endpoint, ModelRoute, Release
from serin.windows.lmdb_state import LmdbState
from tests.e2e.serving_host import wait_for
from tests.e2e.serving_stack import lone_gateway
from tests.kit.web import Handler, web_server
from tests.unit.windows.test_step import plan

MODELS = ("pay", "other")
LENGTH = "inference-header-content-length"
SECOND = 1_000_000


class Echo(Handler):
    """Says which tensors arrived, and fails the first `failures` requests."""

    protocol_version = "HTTP/1.1"
    failures = 0

    def do_POST(self) -> None:
        body = self.read_body()
        if Echo.failures:
            Echo.failures -= 1
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
        loop.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[tuple[Any, int, Step]]:
    (tmp_path / "plans").mkdir()
    for model in MODELS:
        (tmp_path / "plans" / f"{model}.json").write_bytes(plan().dump())
    state = LmdbState(tmp_path / "state")
    step = Step(tmp_path / "plans", lambda: state)
    with web_server(Echo) as behind, lone_gateway() as (gateway, port, host):
        endpoint = Endpoint(http=f"127.0.0.1:{behind}", grpc="127.0.0.1:1")
        releases = [Release(model=model, version=1) for model in MODELS]
        gateway.apply(
            [ModelRoute(model=each.model, epoch=1, stable=each) for each in releases],
            {each.name: endpoint for each in releases},
            {model: Timeouts(windows=plan().to_json()) for model in MODELS},
        )
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


def ask(port: int, model: str, event: str, card: str, amount: float, **more: Any) -> tuple[int, Any]:
    values = {"at": time.time_ns() // 1000, "id": event, "card": card, "amount": amount}
    kinds = {"at": "INT64", "id": "BYTES", "card": "BYTES", "amount": "FP32"}
    inputs = [
        {"name": name, "datatype": kinds[name], "shape": [1, 1], "data": [value]}
        for name, value in {**values, **more}.items()
    ]
    return post(port, f"/v2/models/{model}/infer", {"inputs": inputs})


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
    _, port, _ = scene
    Echo.failures = 1
    assert ask(port, "pay", "a", "c2", 1.0)[0] == 200
    assert ask(port, "pay", "b", "c2", 1.0)[1]["n"] == 1


def test_a_time_in_the_future_is_refused_at_the_gateway(scene: tuple[Any, int, Step]) -> None:
    _, port, _ = scene
    status, answer = ask(port, "pay", "a", "c3", 1.0, at=time.time_ns() // 1000 + 3600 * SECOND)
    assert status == 400
    assert "in the future" in answer["error"]


def test_a_key_of_one_model_pushes_no_events_to_another(scene: tuple[Any, int, Step]) -> None:
    gateway, port, _ = scene
    file = KeyFile(path=gateway.keys._file.path, published=gateway.keys._file.published)
    _, key = file.create("cash", models=["other"])
    gateway.keys.follow()
    event = {"events": [{"id": "b", "at": time.time_ns() // 1000, "card": "c1", "amount": 2.5}]}
    assert post(port, "/v2/models/pay/events", event, key)[0] == 403
    assert post(port, "/v2/models/pay/events", event)[0] == 401
    assert post(port, "/v2/models/other/events", event, key) == (200, {"counted": 1})
