"""The load generator and the probe of a release."""

import importlib
import math

import pytest

from serin.machine.ports import free_ports
from serin.serving.client.tensors import read_http_answer
from serin.serving.triton import probe
from serin.serving.triton.probe import answers
from serin.serving.tuning.load import Closed, LoadResult, Open, run_load
from serin.serving.tuning.load_connections import Target
from serin.store.artifacts import Release
from tests.kit.load import json_target, model_target
from tests.kit.waiting import until
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA
from tests.unit.serving.pausing_server import ANSWER, PausingServer, pauses_once, serving

PAUSE_S = 0.5


def target(server: PausingServer, timeout_s: float = 10.0) -> Target:
    return json_target(server.url, "/v2/models/m/infer", [{"n": 1}, {"n": 2}], timeout_s=timeout_s)


def test_the_open_loops_p99_shows_a_single_pause_of_the_server() -> None:
    with serving(pauses_once(60, PAUSE_S)) as server:
        result = run_load(target(server), Open(requests_per_s=200), seconds=1.5)
    assert result.outcomes == {"200": 300}
    assert result.quantile_ms(0.99) > 0.9 * PAUSE_S * 1000, "a third of a hundredth came early in the pause"
    assert result.quantile_ms(0.75) > 0.1 * PAUSE_S * 1000, "100 of 300 had to wait"


def test_requests_wait_for_a_connection_and_their_waiting_counts() -> None:
    with serving(pauses_once(20, PAUSE_S)) as server:
        result = run_load(target(server), Open(requests_per_s=100, connections=1), seconds=1.0)
    assert result.outcomes == {"200": 100}
    assert result.quantile_ms(0.99) > 0.7 * PAUSE_S * 1000


def test_the_open_loop_keeps_its_rate() -> None:
    with serving() as server:
        result = run_load(target(server), Open(requests_per_s=300), seconds=1.0)
    assert result.outcomes == {"200": 300} == {"200": server.answered}


def test_what_is_asked_while_warming_up_is_not_counted() -> None:
    with serving() as server:
        result = run_load(target(server), Open(requests_per_s=200), seconds=0.5, warm_up_s=0.5)
    assert result.requests == 100
    assert server.answered == 200


def test_every_error_is_counted_by_its_kind() -> None:
    replies = [ANSWER, b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", None, b"what?\r\n\r\n"]
    with serving(lambda number: replies[number % 4]) as server:
        result = run_load(target(server), Open(requests_per_s=100, connections=1), seconds=0.4)
    assert result.outcomes == {"200": 10, "503": 10, "closed": 10, "unreadable": 10}
    assert (result.failed, result.errors) == (30, {"503": 10, "closed": 10, "unreadable": 10})


def test_an_answer_that_does_not_come_is_a_timeout_and_the_next_request_has_a_connection() -> None:
    with serving(pauses_once(0, 0.6)) as server:
        late = target(server, timeout_s=0.3)
        result = run_load(late, Closed(clients=1), seconds=30, stop=lambda: server.answered >= 20)
    assert result.outcomes["timeout"] >= 1
    assert result.outcomes["200"] >= 1
    assert result.failed == result.outcomes["timeout"]


def test_answers_in_chunks_and_in_pieces_are_read_whole() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=1\r\nhello\r\n0\r\n\r\n"
    large = b"HTTP/1.1 200 OK\r\ncontent-length: 3000000\r\n\r\n" + b"x" * 3_000_000
    closing = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
    replies = [chunked, large, closing]
    with serving(lambda number: replies[number % 3]) as server:
        result = run_load(target(server), Open(requests_per_s=30, connections=1), seconds=0.3)
    assert result.outcomes == {"200": 9}


@pytest.mark.parametrize("pace", [Closed(clients=2), Open(requests_per_s=50)])
def test_load_on_a_closed_port_is_all_failures(pace: Closed | Open) -> None:
    nobody = model_target(f"127.0.0.1:{free_ports(1)[0]}", MODEL, bundles.rows(4), SCHEMA)
    result = run_load(nobody, pace, seconds=0.5)
    assert set(result.outcomes) == {"refused"}
    assert result.failed == result.requests > 0
    assert math.isnan(result.quantile_ms(0.5))


def test_grpc_on_a_closed_port_is_unavailable() -> None:
    url = f"127.0.0.1:{free_ports(1)[0]}"
    nobody = model_target(url, MODEL, bundles.rows(4), SCHEMA, protocol="grpc", timeout_s=30.0)
    result = run_load(nobody, Closed(clients=1), seconds=1)
    assert set(result.outcomes) == {"UNAVAILABLE"}


def test_the_clients_of_the_demo_count_answers_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("examples/flights")
    with serving(lambda number: ANSWER if number % 4 else None) as server:
        traffic = importlib.import_module("traffic").Traffic(server.url, "m", [[{"n": 1}]])
        with traffic:
            until(lambda: server.answered > 60)
    assert traffic.answered >= 20
    assert traffic.failures["closed"] >= 5


def test_it_stops_when_asked_to() -> None:
    with serving() as server:
        result = run_load(
            target(server), Open(requests_per_s=100), seconds=60, stop=lambda: server.answered >= 20
        )
    assert 20 <= result.requests < 6000


def test_a_load_result_counts_only_good_answers_as_latencies() -> None:
    result = LoadResult(seconds=2.0, outcomes={"200": 3, "503": 1}, latencies=[0.001, 0.002, 0.003])
    assert (result.requests, result.failed, result.requests_per_s) == (4, 1, 1.5)
    assert result.quantile_ms(0.5) == 2.0
    assert result.quantile_ms(1.0) == 3.0


def test_an_answer_in_json_is_read_as_one_in_bytes_is() -> None:
    body = b'{"outputs": [{"name": "s", "datatype": "FP32", "shape": [2, 1], "data": [1, 2.5]}]}'
    assert read_http_answer(body, None)["s"].tolist() == [[1.0], [2.5]]
    with pytest.raises(ValueError, match="KeyError"):
        read_http_answer(b"{}", None)


V1 = Release(model="delays", version=1)


@pytest.mark.parametrize(
    ("asked", "alive"),
    [
        ([True], True),
        ([False, True], True),
        ([False, False, True], True),
        ([False, False, False, True], False),
        ([TimeoutError(), True], True),
        ([TimeoutError(), TimeoutError(), True], False),
        ([TimeoutError(), False, True], True),
        ([ConnectionRefusedError(), True], False),
    ],
)
def test_busy_is_not_dead_and_a_row_that_failed_once_is_asked_again(
    asked: list[bool | OSError], alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(asked)

    def ask(*_: object) -> bool:
        found = left.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(probe, "_asked", ask)
    assert answers("127.0.0.1:1", V1, SCHEMA) is alive
