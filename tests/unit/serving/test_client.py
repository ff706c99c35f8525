"""The client, and how a server is asked."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from serin.errors import ClientIdRefused, GatewayRejected, PredictionFailed, RowsUnfit
from serin.machine.ports import free_ports, is_free
from serin.serving.client.address import Address
from serin.serving.client.client import Client, Protocol, predict, request_columns
from serin.serving.client.tensors import encode
from serin.serving.envoy.gateway import Gateway
from serin.store.artifacts import ModelRoute
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA
from tests.unit.serving.pausing_server import serving

BUSY = b'HTTP/1.1 503 Busy\r\ncontent-length: 21\r\n\r\n{"error": "too busy"}'
REFUSED = b'HTTP/1.1 401 No\r\ncontent-length: 26\r\n\r\n{"error": "a key, please"}'


def scored() -> bytes:
    outputs = [{"name": "score", "datatype": "FP32", "shape": [1, 1], "data": [0.25]}]
    body = json.dumps({"outputs": outputs}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def test_an_overload_and_a_closed_connection_are_tried_again() -> None:
    replies = [BUSY, None, scored()]
    with serving(lambda number: replies[number]) as server, Client(server.url, MODEL, retries=2) as model:
        scores = model.predict_wire(bundles.rows(1), SCHEMA)["score"]
    assert scores.tolist() == [[0.25]]
    assert server.answered == 3


@pytest.mark.parametrize(("asked_s", "least_s"), [("0.4", 0.4), ("3600", 0.0), ("tomorrow", 0.0)])
def test_an_overloaded_server_is_asked_again_when_it_said_if_there_is_time(
    asked_s: str, least_s: float
) -> None:
    busy = BUSY.replace(b"\r\n", f"\r\nretry-after: {asked_s}\r\n".encode(), 1)
    replies = [busy, scored()]
    with serving(lambda number: replies[number]) as server, Client(server.url, MODEL) as model:
        began = time.monotonic()
        model.predict_wire(bundles.rows(1), SCHEMA)
        assert time.monotonic() - began >= least_s
    assert server.answered == 2


def test_what_the_server_said_is_in_the_error_when_every_try_failed() -> None:
    with (
        serving(lambda _: BUSY) as server,
        Client(server.url, MODEL, retries=1) as model,
        pytest.raises(PredictionFailed, match=r"answered 503: too busy \(asked 2 times\)"),
    ):
        model.predict_wire(bundles.rows(1), SCHEMA)
    assert server.answered == 2


def test_a_refusal_is_not_tried_again() -> None:
    with (
        serving(lambda _: REFUSED) as server,
        Client(server.url, MODEL, retries=5) as model,
        pytest.raises(PredictionFailed, match="answered 401: a key, please"),
    ):
        model.predict_wire(bundles.rows(1), SCHEMA)
    assert server.answered == 1


def test_connections_are_used_again() -> None:
    with serving(lambda _: scored()) as server, Client(server.url, MODEL) as model:
        for _ in range(5):
            model.predict_wire(bundles.rows(1), SCHEMA)
        assert len(server._sockets) == 1


def test_the_key_goes_with_every_request_and_into_no_error() -> None:
    with (
        serving(lambda _: REFUSED) as server,
        Client(server.url, MODEL, api_key="serin_secret") as model,
        pytest.raises(PredictionFailed) as failed,
    ):
        model.predict_wire(bundles.rows(1), SCHEMA)
    assert b"authorization: Bearer serin_secret" in server.heads[0]
    assert "serin_secret" not in str(failed.value)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_that_is_not_there_is_named_after_the_last_try(protocol: Protocol) -> None:
    (port,) = free_ports(1)
    with (
        Client(f"127.0.0.1:{port}", MODEL, protocol=protocol, retries=1, timeout_s=5) as model,
        pytest.raises(PredictionFailed, match="asked 2 times"),
    ):
        model.predict_wire(bundles.rows(1), SCHEMA)


def test_an_answer_without_the_models_output_is_an_error() -> None:
    empty = b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"outputs": []}'
    with (
        serving(lambda _: empty) as server,
        Client(server.url, MODEL) as model,
        pytest.raises(PredictionFailed, match="lacks the output 'score'"),
    ):
        model.predict_wire(bundles.rows(1), SCHEMA)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    "unkept", ["üüü", "", " order", "order ", "a\r\nx-evil: 1", "a\n", "\x7f", 129 * "x"]
)
def test_a_client_id_that_would_not_be_kept_is_refused_and_nothing_is_sent(
    protocol: Protocol, unkept: str
) -> None:
    with (
        serving(lambda _: scored()) as server,
        Client(server.url, MODEL, protocol=protocol) as model,
        pytest.raises(ClientIdRefused, match="would not be kept: use 1 to 128 printable ASCII characters"),
    ):
        model.predict_wire(bundles.rows(1), SCHEMA, client_id=unkept)
    assert server.answered == 0


@pytest.mark.parametrize("kept", ["order 17", "~!", 128 * "x"])
def test_a_client_id_that_is_kept_is_sent_as_it_is(kept: str) -> None:
    with serving(lambda _: scored()) as server, Client(server.url, MODEL) as model:
        model.predict_wire(bundles.rows(1), SCHEMA, client_id=kept)
    assert f"x-request-id: {kept}" in server.heads[0].decode().split("\r\n")


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("localhost:8080", Address(host="localhost", port=8080)),
        ("http://10.0.0.1", Address(host="10.0.0.1", port=80)),
        ("https://models.example/", Address(host="models.example", port=443, tls=True)),
        ("http://[::1]:9000", Address(host="::1", port=9000)),
    ],
)
def test_addresses_are_read_as_people_write_them(url: str, wanted: Address) -> None:
    assert Address.parse(url) == wanted
    assert str(Address.parse("http://[::1]:9000")) == "[::1]:9000"


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:8080/v2/models", "http://user@x"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://"):
        Address.parse(url)


def test_certificates_belong_to_https() -> None:
    with pytest.raises(ValueError, match="not https"):
        Address.parse("http://x:1", ca=Path("ca.pem"))


def test_rows_of_text_keep_their_letters() -> None:
    columns = {**bundles.rows(1), "carrier": np.array([["Zürich 雪"]], dtype=object)}
    tensor = encode(columns, SCHEMA)[0]
    text = "Zürich 雪".encode()
    assert (tensor.dtype, tensor.shape, tensor.data) == (
        "BYTES", (1, 1), len(text).to_bytes(4, "little") + text,
    )  # fmt: skip


def closed() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_that_is_not_there_is_named(protocol: Protocol) -> None:
    with pytest.raises(PredictionFailed, match=f"model '{MODEL}' answered"):
        predict(closed(), MODEL, bundles.rows(1), SCHEMA, protocol, timeout_s=2)


def test_a_column_that_is_missing_is_named_before_anything_is_sent() -> None:
    columns = bundles.rows(2)
    columns["distanc"] = columns.pop("distance")
    with pytest.raises(RowsUnfit, match="did you mean 'distanc'"):
        predict(closed(), MODEL, columns, SCHEMA)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(RowsUnfit, match="another number of rows"):
        request_columns({**bundles.rows(3), "night": np.zeros((2, 1), np.int8)}, SCHEMA)


def test_columns_get_their_wire_types() -> None:
    columns = {name: values.reshape(-1).tolist() for name, values in bundles.rows(3).items()}
    made = request_columns(columns, SCHEMA)  # type: ignore[arg-type]
    assert [str(values.dtype) for values in made.values()] == ["object", "float32", "int64", "int8"]
    assert {values.shape for values in made.values()} == {(3, 1)}


def test_free_ports_differ_and_leave_out_what_is_asked() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)
    assert not set(free_ports(20, but=ports)) & set(ports)


def test_a_push_to_an_envoy_that_does_not_run_is_refused_and_leaves_the_files_alone(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path / "gateway", admin=tmp_path / "a.sock", log=tmp_path / "requests.jsonl")
    gateway.write_bootstrap(free_ports(1)[0])
    before = {path: path.read_text() for path in tmp_path.rglob("*.json")}
    assert not gateway.ready()
    with pytest.raises(GatewayRejected, match="does not answer"):
        gateway.apply([ModelRoute(model=MODEL, epoch=1, stable=None)], {})
    gateway.write_bootstrap(int(closed().split(":")[1]))
    after = {path: path.read_text() for path in tmp_path.rglob("*.json")}
    changed = {path.name for path in after if after[path] != before.get(path)}
    assert changed == {"listener.json"}
