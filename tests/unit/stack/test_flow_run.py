"""Starting runs. With a stack they are started in tests/e2e/; here by a client of a server elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serin.cli import app
from serin.errors import NotFound, NotUp, PipelineFailed, PrefectLoginRefused
from serin.stack.prefect import deploy, follow
from serin.stack.prefect.flow_run import run_pipeline
from tests.fakes.prefect import Server, prefect_at_work
from tests.logs import heard

RUN = {
    "id": "7",
    "name": "brave-owl",
    "flow_id": "f",
    "state_type": "FAILED",
    "state_name": "Failed",
    "state": {
        "type": "FAILED",
        "timestamp": "2026-11-15T10:00:00+00:00",
        "message": "column 'age' is missing",
    },
    "start_time": "2026-11-15T10:00:00+00:00",
    "estimated_run_time": 3.0,
    "tags": ["serin", "flights"],
    "parameters": {"spec": "spec.yaml"},
}
LINE = {
    "id": "1", "timestamp": "2026-11-15T10:00:01+00:00", "message": "reading flights.csv", "level": 20,
    "name": "prefect.flow_runs", "task_run_id": None,
}  # fmt: skip
SPEC = """
name: flights
data: {tables: {flights: flights.csv}, target: {expression: "late > 0", task: binary}}
features: [{columns: [distance], steps: [fill_median]}]
model: {kind: mlp}
"""


@pytest.fixture
def elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that PREFECT_API_URL names, for a machine without a stack."""
    with prefect_at_work() as server:
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "ann:secret")
        monkeypatch.setattr(follow, "_LAST_LINES_S", 0.0)
        server.answers = {
            "GET /health": (200, True),
            "GET /deployments/name/pipeline/placed": (200, {"id": "d"}),
            "POST /deployments/d/create_flow_run": (200, RUN),
            "GET /flow_runs/7": (200, RUN),
            "POST /flows/filter": (200, [{"id": "f", "name": "pipeline"}]),
            "POST /flow_runs/filter": (200, [RUN]),
            "POST /deployments/filter": (200, [{"flow_id": "f", "name": "nightly"}]),
            "POST /logs/filter": (200, [LINE]),
            "GET /work_pools/cpu": (200, {"type": "serin"}),
            "POST /work_pools/cpu/workers/filter": (200, [{"status": "ONLINE"}, {"status": "OFFLINE"}]),
        }
        yield server


def start(folder: Path, *, placed: bool = True) -> None:
    spec = folder / "spec.yaml"
    spec.write_text(SPEC)
    run_pipeline(folder / "home", spec, placed=placed, fresh=[], serve=True, follow=True)


def serin(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    return done.output


def test_a_client_without_a_stack_reads_the_log_and_the_reason_of_its_failed_run(
    elsewhere: Server, tmp_path: Path
) -> None:
    said: list[str] = []
    with heard(said.append), pytest.raises(PipelineFailed, match="failed: column 'age' is missing"):
        start(tmp_path)
    assert said[-1] == "reading flights.csv"
    created = [body for call, body in elsewhere.asked if call.endswith("/create_flow_run")]
    assert [(body["tags"], body["parameters"]["spec"]) for body in created] == [
        (["flights"], str(tmp_path / "spec.yaml"))
    ]


def test_a_deployment_that_the_server_lacks_is_named_with_those_it_has(
    elsewhere: Server, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match=r"deployment 'pipeline/inline'.*pipeline/nightly"):
        start(tmp_path, placed=False)


@pytest.mark.parametrize(
    ("login", "reason"), [("ann:wrong", "does not accept the login: it is wrong"), ("", "there is none")]
)
@pytest.mark.parametrize(
    "words", [("runs", "list"), ("runs", "show", "x"), ("runs", "logs", "x"), ("runs", "cancel", "x")]
)
def test_a_wrong_login_is_one_sentence(
    elsewhere: Server, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], login: str, reason: str
) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", login)
    elsewhere.answers = {
        call: (401, {"exception_message": "Unauthorized"}) for call in (*elsewhere.answers, "GET /csrf-token")
    }
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, PrefectLoginRefused)
    assert reason in str(done.exception)
    assert "\n" not in str(done.exception)


def test_runs_and_status_look_at_the_server_and_into_the_store(elsewhere: Server) -> None:
    (run,) = json.loads(serin("runs", "list", "--json"))
    assert (run["name"], run["state"], run["model"]) == ("brave-owl", "failed", "flights")
    assert "column 'age' is missing" in serin("runs", "show", "brave-owl")
    assert "reading flights.csv" in serin("runs", "logs", "brave-owl")
    shown = serin("status")
    assert f"Prefect  {elsewhere.url.removesuffix('/api')}  ready" in shown
    assert "pool cpu                 1 workers online" in shown
    assert "pool gpu                 no worker online" in shown
    status = json.loads(serin("status", "--json"))
    assert (status["up"], status["well"], status["prefect"]["workers"]) == (False, True, {"cpu": 1, "gpu": 0})
    assert "SERIN_STORE names no shared store" in serin("models", "list")


def test_deploy_shows_each_deployment_of_the_file_with_its_next_run(
    elsewhere: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy, "apply_file", lambda *_, **__: None)
    monkeypatch.setattr(deploy, "_SCHEDULED_S", 0.0)
    on = [{"active": True}]
    elsewhere.answers |= {
        "GET /work_pools/gpu": (200, {"type": "serin"}),
        "POST /deployments/filter": (
            200,
            [
                {"id": "1", "flow_id": "f", "name": "nightly", "schedules": on},
                {"id": "2", "flow_id": "f", "name": "by-hand", "schedules": []},
                {"id": "3", "flow_id": "f", "name": "held", "schedules": on, "paused": True},
            ],
        ),
        "POST /flow_runs/filter": (200, [{"expected_start_time": "2026-11-18T03:00:00+01:00"}]),
    }
    file = tmp_path / "prefect.yaml"
    file.write_text("deployments: [{name: nightly}, {name: by-hand}, {name: held}]")
    assert serin("deploy", str(file)).splitlines() == [
        "pipeline/by-hand: without a schedule; it runs when it is started",
        "pipeline/held: paused",
        "pipeline/nightly: next run 2026-11-18 02:00:00 UTC",
    ]
    asked = [body for call, body in elsewhere.asked if call == "POST /deployments/filter"]
    assert asked[-1]["deployments"]["name"]["any_"] == ["nightly", "by-hand", "held"]
    serin("deploy")
    asked = [body for call, body in elsewhere.asked if call == "POST /deployments/filter"]
    assert {"inline", "placed", "scheduled"} <= {*asked[-1]["deployments"]["name"]["any_"]}
    elsewhere.answers["POST /flow_runs/filter"] = (200, [])
    assert "pipeline/nightly: scheduled; its next run is not planned yet" in serin("deploy", str(file))


def test_a_server_on_this_machine_that_is_gone_was_a_stack_s(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert serin("runs", "list", "--json") == "[]\n"
    assert "start one with `serin up`" in serin("status", code=1)


def test_a_run_without_a_stack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotUp, match="serin up"):
        run_pipeline(tmp_path, tmp_path / "spec.yaml", placed=False, fresh=[], serve=True, follow=True)
