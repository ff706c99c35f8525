"""A model's life in service, by the command and on real parts: its logs, its end, and the end of its versions."""

import csv
import json
import os
from pathlib import Path

import pytest

from serin.errors import PredictionFailed
from serin.host.process_scan import stack_processes
from serin.host.supervisor import Supervisor
from serin.host.wiring import build_gateway, request_log
from serin.machine import locks
from serin.serving.client.client import Client, Protocol
from serin.serving.envoy.gateway import PROCESS_NAME
from serin.store.store import Store
from tests.e2e.serving_alone import Alone, serving_alone
from tests.e2e.serving_certificates import Authority
from tests.e2e.serving_stack import good_inputs
from tests.kit.commands import serin
from tests.kit.web import ask
from tests.signals import hit
from tests.unit.serving import bundles
from tests.unit.serving.bundles import MODEL

SPEC = """
name: delays
model: {onnx: delays.onnx, task: binary, answer: probabilities, golden: rows.npz}
objectives: {latency_ms: 50}
serving: {request_timeout: 4s}
"""
ROWS = {"carrier": ["AA"], "temp": [0.5], "distance": [1], "night": [False]}
INFER = f"/v2/models/{MODEL}/infer"


def post(port: int, path: str = INFER) -> tuple[int, str]:
    answer = ask(port, path, {"inputs": good_inputs()})
    return answer.status, answer.text


def releases(alone: Alone) -> list[str]:
    return [child.name for child in Supervisor(alone.home).children() if child.name.startswith(MODEL)]


def switch_on_tls_and_keys(alone: Alone, folder: Path) -> tuple[str, str, Path]:
    """By the commands, in the stack that is up; then everybody asks as before, with and without the request filter."""
    authority, files = Authority(), [folder / "cert.pem", folder / "key.pem"]
    authority.pair().write(*files)
    (trusted := folder / "ca.pem").write_bytes(authority.certificate)
    rows, scores = folder / "rows.csv", folder / "scores.csv"
    rows.write_text(",".join(ROWS) + "\n" + ",".join(str(values[0]) for values in ROWS.values()) + "\n")
    serin("up", "--tls-cert", str(files[0]), "--tls-key", str(files[1]))
    key = json.loads(serin("keys", "create", "ada", "--json"))["key"]
    url = f"https://localhost:{alone.port}"
    shown = json.loads(serin("status", "--json"))["gateway"]
    guard = shown["guard"]
    assert (shown["url"], guard["tls"], guard["keys_required"]) == (
        f"https://127.0.0.1:{alone.port}", True, True,
    )  # fmt: skip

    def ask(protocol: Protocol) -> float:
        with Client(url, MODEL, protocol=protocol, api_key=key, ca=trusted) as model:
            return float(model.predict(ROWS)["score"][0, 0])

    def command(*options: str) -> float:
        serin("predict", MODEL, str(rows), "--out", str(scores), *options)
        return float(scores.read_text().splitlines()[1].rpartition(",")[2])

    expected = ask("http")
    serin("predict", MODEL, str(rows), "--out", str(scores), "--ids")
    with scores.open() as file:
        (scored,) = csv.DictReader(file)
    assert (float(scored["score"]), scored["_row"]) == (pytest.approx(expected, rel=1e-5), "0")
    alone.until("the request in the log", lambda: scored["_id"] in request_log(alone.home).read_text())
    with Client(url, MODEL, ca=trusted) as model, pytest.raises(PredictionFailed, match="answered 401"):
        model.predict(ROWS)
    for found in (ask("grpc"), command(), command("--grpc")):
        assert found == pytest.approx(expected, rel=1e-5)

    gateway = build_gateway(alone.home)
    gateway.write_bootstrap(alone.port, tls=gateway.tls.files(), request_filter=None)
    before = gateway_pid(alone)
    assert before is not None
    hit(before)  # the supervisor starts another one
    alone.until("a gateway without the filter", lambda: gateway_pid(alone) != before and gateway.ready())
    assert [ask("http"), command()] == pytest.approx([expected, expected], rel=1e-5)
    assert "no request filter" in serin("predict", MODEL, str(rows), "--grpc", code=1)
    return url, key, trusted


def gateway_pid(alone: Alone) -> int | None:
    (found,) = [child.pid for child in Supervisor(alone.home).children() if child.name == PROCESS_NAME]
    return found


def test_a_model_is_retired_stays_so_after_a_restart_and_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("SERIN_HOME", str(home))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    store = Store.open()
    versions = [bundles.publish(store, bias=bias, spec=SPEC).version for bias in (-1.0, 1.0)]
    for lock in [lock for lock in locks._held if lock.is_relative_to(home)]:
        os.close(locks._held.pop(lock))  # as if another process, which has ended, had published them
    with serving_alone(home) as alone:
        alone.roll_out(MODEL, 1)
        assert post(alone.port)[0] == 200
        assert post(alone.port, f"{INFER}x")[0] == 404
        alone.until("the log", lambda: "direct_response" in serin("logs", MODEL))
        said = serin("logs", MODEL, "--lines", "3")
        for words in (f"==> {MODEL}-v1", "==> controller", f"{MODEL}-v1: promoted", "==> gateway"):
            assert words in said, said

        url, key, trusted = switch_on_tls_and_keys(alone, tmp_path)

        assert "it is live; run `serin retire delays` first" in serin("models", "remove", MODEL, "-y", code=1)
        assert "add --yes" in serin("retire", MODEL, code=2)
        assert alone.live(MODEL) == 1
        assert "`serin rollout start delays:1` serves it again" in serin("retire", MODEL, "--yes")
        gone = pytest.raises(PredictionFailed, match="no such model or version is served here")
        with Client(url, MODEL, api_key=key, ca=trusted) as model, gone:
            model.predict(ROWS)
        alone.until("the end of its process", lambda: releases(alone) == [])
        assert f"{MODEL}: retired" in serin("status")
        assert "no version of it is served" in serin("retire", MODEL, "--yes", code=1)
        assert store.versions(MODEL) == versions
    assert stack_processes(home) == []

    with serving_alone(home) as alone:
        assert releases(alone) == []
        assert "version 1 is deleted" in serin("models", "remove", f"{MODEL}:1", "--yes")
        assert store.versions(MODEL) == versions[1:]
        assert "no log of model 'none'" in serin("logs", "none", code=1)
