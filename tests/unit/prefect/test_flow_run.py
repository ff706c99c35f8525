"""Starting and following runs. With a stack they are started in tests/e2e/; here by a client of a server elsewhere."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from serin.cli import app
from serin.errors import NotFound, NotUp, PipelineFailed, PrefectGone, PrefectLoginRefused, SpecError
from serin.host.state import Stack
from serin.machine import packages
from serin.pipeline.open_spec import copy_package
from serin.prefect import deploy, follow, rest_api
from serin.prefect.flow_run import run_pipeline
from serin.prefect.follow import RunLog, follow_run, last_line
from serin.prefect.login import PrefectServer
from serin.prefect.rest_api import Api
from serin.prefect.run_entries import model_asked_for
from serin.spec.load import read_spec
from serin.store.stage_keys import note
from serin.store.store import Store
from tests.fakes.prefect import FAILED_RUN, Server, prefect_at_work
from tests.kit.commands import serin
from tests.kit.stacks import stack_in
from tests.logs import heard
from tests.unit.serving import bundles

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
        monkeypatch.setenv("SERIN_STORE", str(home / "shared"))
        monkeypatch.setattr(follow, "_LAST_LINES_S", 0.0)
        server.answers = {
            "GET /health": (200, True),
            "GET /deployments/name/pipeline/placed": (200, {"id": "d"}),
            "POST /deployments/d/create_flow_run": (200, FAILED_RUN),
            "GET /flow_runs/7": (200, FAILED_RUN),
            "POST /flows/filter": (200, [{"id": "f", "name": "pipeline"}]),
            "POST /flow_runs/filter": (200, [FAILED_RUN]),
            "POST /deployments/filter": (200, [{"flow_id": "f", "name": "nightly"}]),
            "POST /logs/filter": (200, [LINE]),
            "GET /work_pools/cpu": (200, {"type": "serin"}),
            "POST /work_pools/cpu/workers/filter": (200, [{"status": "ONLINE"}, {"status": "OFFLINE"}]),
        }
        yield server


def start(folder: Path, *, placed: bool = True, more: str = "") -> None:
    spec = folder / "spec.yaml"
    spec.write_text(SPEC + more)
    (folder / "flights.csv").write_text("late,distance\n1,2\n")
    run_pipeline(folder / "home", read_spec(spec), placed=placed, fresh=[], serve=True, follow=True)


def test_a_client_without_a_stack_reads_the_log_and_the_reason_of_its_failed_run(
    elsewhere: Server, tmp_path: Path
) -> None:
    said: list[str] = []
    with heard(said.append), pytest.raises(PipelineFailed, match="failed: column 'age' is missing"):
        start(tmp_path)
    assert said[-1] == "reading flights.csv"
    ((tags, sent),) = [
        (body["tags"], body["parameters"]["spec"])
        for call, body in elsewhere.asked
        if call.endswith("/create_flow_run")
    ]
    assert tags == ["flights"]
    folder = copy_package(sent, tmp_path / "sent")
    assert sorted(path.name for path in folder.iterdir()) == ["flights.csv", "spec.yaml"]


def test_workers_elsewhere_need_a_store_that_they_can_read(
    elsewhere: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SERIN_STORE")
    with pytest.raises(SpecError, match=r"SERIN_STORE: is not set, and the workers of http.* cannot read"):
        start(tmp_path)
    assert not any(call.endswith("/create_flow_run") for call, _ in elsewhere.asked)


def test_an_image_is_refused_by_name_where_stages_are_no_jobs_on_kubernetes(
    elsewhere: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_entered", [])
    image = "environment: {image: registry/mine:1}"
    with pytest.raises(SpecError, match=r"environment.image: is for pools of type .*: cpu \(serin\)"):
        start(tmp_path, more=image)
    assert not (tmp_path / "home" / "shared" / "packages").exists(), "nothing is sent before"
    elsewhere.answers["GET /work_pools/cpu"] = (200, {"type": "serin-kubernetes"})
    with pytest.raises(PipelineFailed):
        start(tmp_path, more=image)
    (created,) = started(elsewhere)
    assert created["job_variables"] == {"image": "registry/mine:1"}
    sent = created["parameters"]["spec"]
    with pytest.raises(PipelineFailed):
        run_pipeline(tmp_path / "home", sent, placed=True, fresh=[], serve=True, follow=True)
    assert [(body["parameters"], body["job_variables"]) for body in started(elsewhere)[1:]] == [
        (created["parameters"], created["job_variables"])
    ]
    elsewhere.answers["GET /work_pools/cpu"] = (200, {"type": "serin"})
    with pytest.raises(SpecError, match=r"environment.image"):
        run_pipeline(tmp_path / "home", sent, placed=True, fresh=[], serve=True, follow=True)


@pytest.mark.parametrize(
    ("priority", "placed", "asked"),
    [("urgent", False, "serin-urgent"), ("urgent", True, "serin-urgent"), ("idle", False, "serin-idle")],
)
def test_a_run_asks_the_queue_of_a_cluster_for_its_priority(
    elsewhere: Server, tmp_path: Path, priority: str, placed: bool, asked: str
) -> None:
    elsewhere.answers["GET /deployments/name/pipeline/inline"] = (200, {"id": "d"})
    with pytest.raises(PipelineFailed):
        start(tmp_path, placed=placed, more=f"priority: {priority}")
    (created,) = started(elsewhere)
    assert created["job_variables"] == {"qos": asked, "priority_class": asked}
    with pytest.raises(PipelineFailed):  # again from its package, which has the spec
        run_pipeline(
            tmp_path / "home", created["parameters"]["spec"], placed=placed, fresh=[], serve=True, follow=True
        )
    assert started(elsewhere)[1]["job_variables"] == created["job_variables"]


@pytest.mark.parametrize("priority", ["idle", "normal"])
def test_the_parent_of_placed_stages_gives_way_to_nobody(
    elsewhere: Server, tmp_path: Path, priority: str
) -> None:
    with pytest.raises(PipelineFailed):
        start(tmp_path, more=f"priority: {priority}")
    assert "job_variables" not in started(elsewhere)[0]


def started(server: Server) -> list[dict[str, Any]]:
    return [body for call, body in server.asked if call.endswith("/create_flow_run")]


def test_a_run_names_its_spec_its_code_and_its_environment_once(
    elsewhere: Server, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_entered", [])
    elsewhere.answers["GET /work_pools/cpu"] = (200, {"type": "serin-kubernetes"})
    with pytest.raises(PipelineFailed):
        start(tmp_path, more="environment: {image: registry/mine:1}")
    (parameters,) = [body["parameters"] for body in started(elsewhere)]
    elsewhere.answers["POST /flow_runs/filter"] = (200, [{**FAILED_RUN, "parameters": parameters}])
    assert named(serin("runs", "show", "brave-owl")) == [
        ["spec", "flights"],
        ["code", parameters["spec"]],
        ["environment", '{"image": "registry/mine:1"}'],
    ]
    for stage in ("etl", "train"):
        note(home, FAILED_RUN["id"], stage, ran=True, why="new", environment="0123 (registry/mine:1)")
    assert named(serin("runs", "show", "brave-owl"))[2] == ["environment", "0123 (registry/mine:1)"]


def named(shown: str) -> list[list[str]]:
    lines = [line.split(maxsplit=1) for line in shown.splitlines()]
    return [words for words in lines if words[0] in ("spec", "code") or "environment" in words[0]]


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


def test_a_host_whose_agent_has_no_prefect_deploys_to_the_server_that_is_named(
    elsewhere: Server, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack_in(home)
    monkeypatch.setattr(deploy, "apply_file", lambda *_, **__: None)
    elsewhere.answers["GET /work_pools/gpu"] = (200, {"type": "serin"})
    file = tmp_path / "prefect.yaml"
    file.write_text("deployments: [{name: nightly}]")
    assert "pipeline/nightly: without a schedule" in serin("deploy", str(file))


def test_a_server_on_this_machine_that_is_gone_was_a_stack_s(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert serin("runs", "list", "--json") == "[]\n"
    assert "start one with `serin up`" in serin("status", code=1)


def test_a_run_without_a_stack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotUp, match="serin up"):
        run_pipeline(tmp_path, tmp_path / "spec.yaml", placed=False, fresh=[], serve=True, follow=True)


BEGAN = datetime(2026, 11, 15, tzinfo=UTC)
API = Api("http://nowhere/api")
LAST = "the run completed"


@dataclass
class ListedServer:
    """Gives the lines it has, as Prefect's would: by time, at most as many as asked for."""

    lines: list[tuple[float, str, str | None]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)  # one after the other; "" is no answer
    lasts_s: float = 60.0  # since when it is in the state that is asked for
    happens: list[tuple[float, str, str | None]] = field(default_factory=list)  # said after the last state
    message: str | None = None  # of the state

    def call(self, _: Api, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if method == "GET":
            assert path == "/flow_runs/7"
            state = self.states.pop(0)
            if not self.states:
                self.lines += self.happens
            if not state:
                raise PrefectGone(url="http://nowhere/api", reason="it is being restarted")
            since = datetime.now(UTC) - timedelta(seconds=self.lasts_s)
            return {
                "state_type": state,
                "state": {"type": state, "timestamp": since.isoformat(), "message": self.message},
            }
        assert body is not None
        assert body["logs"]["flow_run_id"] == {"any_": ["7"]}
        after = datetime.fromisoformat(
            body["logs"].get("timestamp", {"after_": "2000-01-01T00:00+00:00"})["after_"]
        )
        entries = [
            {
                "id": text,
                "timestamp": (BEGAN + timedelta(seconds=at)).isoformat(),
                "message": text,
                "task_run_id": task,
                "level": 40 if "error" in text else 20,
                "name": "prefect.flow_runs.worker" if text.startswith("Worker") else "prefect.flow_runs",
            }
            for at, text, task in sorted(self.lines)
            if BEGAN + timedelta(seconds=at) >= after
        ]
        return entries[body["offset"] : body["offset"] + body["limit"]]


@dataclass
class Up:
    """What a follower asks of a stack."""

    is_alive: bool = True


def of_stack(home: Path, *, alive: bool = True) -> PrefectServer:
    return PrefectServer(home=home, api=API, stack=cast("Stack", Up(is_alive=alive)))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ListedServer:
    made = ListedServer()
    monkeypatch.setattr(follow, "call", made.call)
    monkeypatch.setattr(rest_api, "call", made.call)
    for name in ("_POLL_S", "_LAST_POLL_S"):
        monkeypatch.setattr(follow, name, 0.0)
    return made


def test_every_line_is_given_once_however_many_and_however_late(server: ListedServer) -> None:
    log = RunLog(API, "7")
    server.lines = [(number / 100, f"line {number}", None) for number in range(450)]
    assert log.new_lines() == [(BEGAN.timestamp() + at, text) for at, text, _ in server.lines]
    server.lines += [(2.0, "late", None), (60.0, "new", None)]
    assert [line for _, line in log.new_lines()] == ["late", "new"]
    assert log.new_lines() == []


def test_a_task_that_has_finished_is_not_the_run_s_end(server: ListedServer) -> None:
    log = RunLog(API, "7")
    server.lines = [(1.0, LAST, "a-task")]
    log.new_lines()
    assert not log.has_ended
    server.lines.append((2.0, last_line("Failed", "no reason"), None))
    log.new_lines()
    assert log.has_ended


def _follow(tmp_path: Path, *, alive: bool = True) -> list[str]:
    said: list[str] = []
    with heard(said.append):
        follow_run(of_stack(tmp_path, alive=alive), "7", what="spec.yaml", log=RunLog(API, "7"))
    return said


def test_a_run_is_followed_past_a_restart_of_the_server_to_its_last_line(
    server: ListedServer, tmp_path: Path
) -> None:
    server.lines = [(1.0, "it is trained", None)]
    server.states, server.happens = ["PENDING", "RUNNING", "", "COMPLETED"], [(9.0, LAST, None)]
    assert _follow(tmp_path) == ["it is trained"]


def test_how_prefect_gets_to_the_flow_is_left_out_but_what_went_wrong_with_it_is_not(
    server: ListedServer,
) -> None:
    server.lines = [
        (1.0, "Worker 'cpu' submitting flow run '7'", None),
        (1.1, "Worker 'cpu' error: no such folder", None),
        (1.2, "Running 1 deployment pull step(s)", None),
        (1.3, "Executing deployment step: enter_application", None),
        (1.4, "Beginning flow run 'calm-owl' for flow 'pipeline'", None),
        (1.5, "Beginning flow run of another kind", "a-task"),
    ]
    assert [line for _, line in RunLog(API, "7").new_lines()] == [
        "Worker 'cpu' error: no such folder",
        "Beginning flow run of another kind",
    ]


@pytest.mark.parametrize(
    ("end", "message", "words"),
    [
        (
            "FAILED",
            "release flights-v2 was rolled back",
            "spec.yaml failed: release flights-v2 was rolled back\n",
        ),
        ("CRASHED", "its process is gone", "spec.yaml crashed: its process is gone\n"),
        ("CANCELLED", None, "spec.yaml was cancelled\n"),
    ],
)
def test_a_run_that_ends_badly_is_an_error_with_its_reason_after_all_it_said(
    end: str, message: str | None, words: str, server: ListedServer, tmp_path: Path
) -> None:
    server.message = message
    server.states = ["RUNNING", end]
    server.happens = [(8.0, "one more", None), (9.0, last_line(end.capitalize(), message or ""), None)]
    said: list[str] = []
    with heard(said.append), pytest.raises(PipelineFailed) as failed:
        follow_run(of_stack(tmp_path), "7", what="spec.yaml", log=RunLog(API, "7"))
    assert said == ["one more"]
    assert str(failed.value) == f"the run of {words}http://nowhere/runs/flow-run/7 shows all of it"


def test_a_run_whose_stack_has_gone_is_not_waited_for(server: ListedServer, tmp_path: Path) -> None:
    server.states = ["RUNNING", "RUNNING"]
    with pytest.raises(NotUp):
        _follow(tmp_path, alive=False)


def test_a_run_that_has_just_crashed_is_followed_when_it_is_queued_again(
    server: ListedServer, tmp_path: Path
) -> None:
    server.lasts_s = 1.0
    server.states, server.happens = (
        ["RUNNING", "CRASHED", "SCHEDULED", "RUNNING", "COMPLETED"],
        [(9.0, LAST, None)],
    )
    assert _follow(tmp_path) == []


def test_a_server_that_is_slow_to_answer_is_asked_again_for_the_same_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[str] = []

    def call(_: Api, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if method == "GET":
            return {"id": "d"}
        assert body is not None
        keys.append(body["idempotency_key"])
        if len(keys) < 3:
            raise PrefectGone(url=API.url, reason="timed out")
        return {"id": "7", "name": "calm-owl"}

    monkeypatch.setattr(follow, "call", call)
    assert follow.begin_run(API, "pipeline/placed", {}, tags=[])["id"] == "7"
    assert len(keys) == 3
    assert len(set(keys)) == 1


@pytest.mark.parametrize(
    ("run", "model"),
    [
        ({"parameters": {"model": "payments:3"}}, "payments"),
        ({"parameters": {"name": "payments:live"}}, "payments"),
        ({"parameters": {"name": "Ann Example"}, "tags": ["flights"]}, "flights"),
        ({"parameters": {"spec": {"name": "payments"}}, "tags": ["nightly"]}, "payments"),
        ({"tags": ["serin", "stage", "payments"]}, "payments"),
        ({"tags": ["nightly", "payments"]}, "payments"),
        ({"tags": ["payments", "nightly"]}, "payments"),
        ({"tags": ["payments", "delays"]}, None),
        ({"tags": ["nightly", "weekly"]}, None),
        ({"tags": ["Not a model"]}, None),
        ({}, None),
    ],
)
def test_the_model_of_a_run_is_the_one_that_it_names_for_sure(
    home: Path, run: dict[str, Any], model: str | None
) -> None:
    for name in ("payments", "delays"):
        bundles.publish(Store.open(), bias=0.0, model=name)
    assert model_asked_for(run) == model


def test_runs_of_others_at_a_shared_server_are_not_shown_by_name(elsewhere: Server) -> None:
    """They may use it for other things."""
    for words in (("runs", "list"), ("runs", "show", "brave-owl")):
        serin(*words)
    asked = [body for call, body in elsewhere.asked if call == "POST /flow_runs/filter"]
    assert len(asked) == 2
    assert {str(body["work_pools"]) for body in asked} == {str({"name": {"any_": ["cpu", "gpu"]}})}
