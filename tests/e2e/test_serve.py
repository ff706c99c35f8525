"""Serving alone, as a container runs it."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serin.cli import app
from serin.errors import PredictionFailed
from serin.host.process_scan import stack_processes
from serin.serving.client.client import Client
from tests.fakes.kserve import MODEL, KServe, serving
from tests.kit.commands import serin
from tests.kit.waiting import running, tail, until
from tests.kit.web import answers, ask
from tests.signals import kill_9


def test_serving_alone_registers_external_servers_and_leaves_nothing_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, port = tmp_path / "home", _free_port()
    monkeypatch.setenv("SERIN_HOME", str(home))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    log = tmp_path / "serve.log"
    with log.open("wb") as output:
        alone = subprocess.Popen(
            [sys.executable, "-m", "serin.cli", "agent", "--alone", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: answers(port, "/v2/health/live"), alive=running(alone), said=tail(log))
        until(
            lambda: _decides(home), alive=running(alone), said=tail(log)
        )  # the gateway answers sooner than the controller hears
        with serving() as stable, serving() as candidate:
            places = [f"localhost:{server.server_port}" for server in (stable, candidate)]
            addresses = "--stable", f"http://{places[0]}", "--candidate", f"http://{places[1]}"
            serin("rollout", "start", MODEL, *addresses, "--no-follow")
            until(
                lambda: ask(port, f"/v2/models/{MODEL}/versions/2/infer", {"inputs": []}).status == 200,
                alive=running(alone),
                said=tail(log),
            )
            status: dict[str, Any] = {}
            until(lambda: status.update(_shown()) or status["well"], alive=running(alone), said=tail(log))
            _is_shown_and_asked(port, status, places, candidate)
        alone.send_signal(signal.SIGTERM)
        assert alone.wait(timeout=120) == 0, log.read_text()
        assert stack_processes(home) == []
    finally:
        alone.kill()
        alone.wait()
        kill_9(*stack_processes(home))


def _is_shown_and_asked(port: int, status: Any, places: list[str], candidate: KServe) -> None:
    """Who answers where, and each by its number and under its own name."""
    releases = status["models"][0]["releases"]
    assert [(each["ready"], each["elsewhere"]) for each in releases] == [(True, at) for at in places]
    assert status["prefect"] is None
    assert candidate.posted == [(f"/v2/models/{MODEL}/infer", "localhost")]
    assert ask(port, f"/v2/models/{MODEL}/versions/3/infer", {"inputs": []}).status == 404
    with (
        Client(f"127.0.0.1:{port}", MODEL, protocol="grpc", version=2, retries=0) as model,
        pytest.raises(PredictionFailed, match="ask it by number over HTTP"),
    ):
        model.predict({"x": [0.5]})


def _shown() -> Any:
    return json.loads(CliRunner().invoke(app, ["status", "--json"]).stdout)


def _decides(home: Path) -> bool:
    log = home / "logs" / "controller.log"
    return log.exists() and "the controller has started" in log.read_text()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
