"""A model's life in service, by the command and on real parts: its logs, its end, and the end of its versions."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from pathlib import Path

import pytest

from serin.stack.host.process_scan import stack_processes
from serin.stack.host.supervisor import Supervisor
from serin.store.store import Store
from tests.e2e.serving_alone import Alone, serin, serving_alone
from tests.e2e.serving_stack import good_inputs
from tests.unit.serving.bundles import MODEL

PUBLISH = """
from serin.store.store import Store
from tests.unit.serving.bundles import publish
for bias in (-1.0, 1.0):
    publish(Store.open(), bias=bias)
"""
INFER = f"/v2/models/{MODEL}/infer"


def post(port: int, path: str = INFER) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", path, json.dumps({"inputs": good_inputs()}))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def releases(alone: Alone) -> list[str]:
    return [child.name for child in Supervisor(alone.home).children() if child.name.startswith(MODEL)]


def test_a_model_is_retired_stays_so_after_a_restart_and_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("SERIN_HOME", str(home))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    store = Store.open()
    # Who publishes a version uses it until it ends: not this process.
    subprocess.run([sys.executable, "-c", PUBLISH], check=True)
    versions = store.versions(MODEL)
    with serving_alone(home) as alone:
        alone.roll_out(MODEL, 1)
        assert post(alone.port)[0] == 200
        assert post(alone.port, f"{INFER}x")[0] == 404
        alone.until("the log", lambda: "direct_response" in serin("logs", MODEL))
        said = serin("logs", MODEL, "--lines", "3")
        for words in (f"==> {MODEL}-v1", "==> controller", f"{MODEL}-v1: promoted", "==> gateway"):
            assert words in said, said

        assert "it is live; run `serin retire delays` first" in serin("models", "delete", MODEL, "-y", code=1)
        assert "Add --yes" in serin("retire", MODEL, code=2)
        assert alone.live(MODEL) == 1
        assert "`serin rollout start delays 1` serves it again" in serin("retire", MODEL, "--yes")
        assert post(alone.port) == (404, '{"error":"no such model or version is served here"}\n')
        alone.until("the end of its process", lambda: releases(alone) == [])
        assert f"{MODEL}: retired" in serin("status")
        assert "no version of it is served" in serin("retire", MODEL, "--yes", code=1)
        assert store.versions(MODEL) == versions
    assert stack_processes(home) == []

    with serving_alone(home) as alone:
        assert (post(alone.port)[0], releases(alone)) == (404, [])
        assert "version 1 is deleted" in serin("models", "delete", f"{MODEL}:1", "--yes")
        assert store.versions(MODEL) == versions[1:]
        assert "no log of model 'none'" in serin("logs", "none", code=1)
