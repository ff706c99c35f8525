from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from serin.errors import GatewayRejected, PredictionFailed, RowsUnfit
from serin.machine.ports import free_ports, is_free
from serin.serving.client.client import Protocol, predict, request_columns
from serin.serving.envoy.gateway import Gateway
from serin.store.artifacts import ModelRoute
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL, SCHEMA


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
