"""The serving benchmark: its figures, how variants are named, and its last line."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.child import ContenderFailed
from benchmarks.race import Role
from benchmarks.serving import model
from benchmarks.serving.benchmark import Case, Lap, Laps, last_line
from benchmarks.serving.contenders import bytes_body
from benchmarks.serving.gpu import _line, _of_turn
from benchmarks.serving.gpu_servers import Wanted
from benchmarks.serving.peers.graph import Graph


def laps(role: Role, *speeds: float, p50_ms: float = 1.0, proxy_us: float = 0.0) -> Laps:
    return Laps(role, [Lap(speed, p50_ms, 2 * p50_ms, 100.0, proxy_us) for speed in speeds])


def round_of(speeds: dict[str, float]) -> dict[str, Laps]:
    roles: dict[str, Role] = {"serin": "ours", "Triton": "limit"}
    proxies = {"serin": 110.0, "Triton, bare Envoy": 100.0}
    return {
        name: laps(
            roles.get(name.partition(" ")[0].rstrip(","), "peer"),
            *(speed * drift for drift in (1.0, 1.2, 0.8)),  # the machine's, the same for all
            proxy_us=proxies.get(name, 1.0),
        )
        for name, speed in speeds.items()
    }


FOUND = {
    Case(1, 1): {
        "serin": laps("ours", 900, 900, 900, p50_ms=1.4),
        "Triton alone": laps("limit", 1100, 1100, 1100, p50_ms=1.0),
    },
    Case(1, 8): round_of({
        "serin": 1000, "serin, waits": 900, "serin, gRPC": 700, "serin, JSON": 600, "Triton alone": 2000,
        "Triton alone, JSON": 1500, "Triton, bare Envoy": 1100, "FastAPI": 500, "FastAPI, binary": 800,
        "FastAPI, Envoy": 300, "FastAPI, binary, Envoy": 500, "MLServer": 100,
    }),
    Case(1, 32): round_of({
        "serin": 1000, "serin, waits": 1200, "serin, gRPC": 900, "serin, JSON": 600, "Triton alone": 2000,
        "Triton alone, JSON": 1500, "Triton, bare Envoy": 1100, "FastAPI": 600, "FastAPI, binary": 1000,
        "FastAPI, Envoy": 400, "FastAPI, binary, Envoy": 800, "MLServer": 900,
    }),
    Case(64, 8): round_of({"serin": 1, "FastAPI": 100}),
}  # fmt: skip


def test_json_is_compared_with_json_and_binary_with_binary_and_the_worse_counts() -> None:
    line = last_line(FOUND)
    assert (line["peer_behind_envoy_json"], line["peer_behind_envoy_binary"]) == pytest.approx((1.5, 1.25))
    assert line["peer_behind_envoy"] == pytest.approx(1.25)
    assert line["peer_alone_json"] == pytest.approx(1500 / 900)  # MLServer is the better one with 32 clients
    assert line["peer_alone_binary"] == pytest.approx(2.0)
    assert line["peer_alone"] == pytest.approx(1500 / 900)


def test_ours_with_a_gateway_is_judged_against_the_best_server_without_one() -> None:
    line = last_line(FOUND)
    assert line["best_peer"] == pytest.approx(1.2)
    assert line["gateway_ms"] == pytest.approx(0.4)
    assert line["over_bare_envoy"] == pytest.approx(1.1)
    assert line["grpc"] == pytest.approx(0.7)


def test_the_peer_reads_the_bytes_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model.graph(), path)
    monkeypatch.setenv("BENCH_MODEL", str(path))
    monkeypatch.setenv("BENCH_THREADS", "1")
    columns = model.rows(5)
    found = np.frombuffer(Graph().score_bytes(bytes_body(columns)), "<f4")
    assert np.allclose(found, model.score(path, columns).reshape(-1))


def test_a_variant_is_named_by_its_words() -> None:
    found = Wanted.parse("two:instances=2,graphs=0,sizes=1+64+4096")
    assert found.name == "two"
    assert found.serving == {"backend": "onnx_native", "device": "gpu", "instances": 2}
    assert found.split == {"graphs": "0", "sizes": "1,64,4096"}
    with pytest.raises(ContenderFailed, match="what is speed"):
        Wanted.parse("fast:speed=9")


def test_variants_take_part_in_the_first_round_and_the_order_changes() -> None:
    names = ["native", "python", "two"]
    assert _of_turn(names, 0) == names
    assert _of_turn(names, 1) == ["python", "native"]
    assert _of_turn(names, 2) == ["native", "python"]


def test_the_last_line_holds_the_goals_against_the_better_limit() -> None:
    speed = {"native": 70.0, "python": 10.0, "limit, 1 callers": 50.0, "limit, 8 callers": 100.0}
    slow = {**speed, "python": 20.0}
    document = {"1": speed, "64": speed, "512": speed, "4096": slow, "p50_ms": {"native": 1.0, "cpu": 0.8}}
    line = _line(document, [1, 64, 512, 4096])
    assert line["limit_64"] == pytest.approx(0.7)
    assert line["before_512"] == pytest.approx(7)
    assert line["one_row_ms"] == pytest.approx(0.2)
    assert (line["goals_met"], line["goals"]) == (5, 6), (
        "3.5 times the Python backend at 4,096 rows is too little"
    )
