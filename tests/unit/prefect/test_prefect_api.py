"""Against a server that speaks like Prefect's: requests, and starts that find what is done already."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from serin.errors import PrefectGone, PrefectRefused
from serin.host.state import Stack
from serin.prefect import deploy, processes, rest_api
from serin.prefect.rest_api import Api
from tests.fakes.prefect import Server, prefect_at_work


@pytest.fixture
def server() -> Iterator[Server]:
    with prefect_at_work() as made:
        yield made


@pytest.mark.parametrize(
    ("code", "there"), [(200, True), (401, True), (404, True), (500, False), (503, False)]
)
def test_a_server_that_asks_for_credentials_is_there_and_a_broken_one_is_not(
    server: Server, code: int, there: bool
) -> None:
    server.answers["GET /health"] = (code, True)
    assert rest_api.answers(server.url) is there


def test_a_port_without_a_server_does_not_answer() -> None:
    assert rest_api.answers("http://127.0.0.1:9/api") is False
    with pytest.raises(PrefectGone, match="does not answer"):
        rest_api.call("http://127.0.0.1:9/api", "GET", "/version")


def test_a_busy_server_is_asked_again_more_often_than_it_refuses(server: Server) -> None:
    """Ten pipelines that begin at once meet in SQLite again and again."""
    server.answers["GET /version"] = (200, "3")
    server.refusals = 5
    assert rest_api.call(server.url, "GET", "/version") == "3"
    assert len(server.asked) == 6


def test_a_refusal_carries_the_servers_words(server: Server) -> None:
    server.answers["POST /work_pools/"] = (422, {"detail": "bad template"})
    with pytest.raises(PrefectRefused, match="bad template"):
        rest_api.ensure_pool(server.url, "cpu", kind="serin", template={}, slots=None)


def test_runs_that_nobody_can_be_running_are_closed(server: Server) -> None:
    server.answers["POST /flow_runs/filter"] = (200, [{"id": "7", "name": "slim-whippet"}])
    server.answers["POST /flow_runs/7/set_state"] = (201, {})
    assert rest_api.close_lost_runs(server.url, ("cpu", "gpu")) == ["slim-whippet"]
    assert server.asked[-1][1]["state"]["type"] == "CRASHED"


def test_deployments_are_named_by_flow_and_name(server: Server) -> None:
    server.answers["POST /deployments/filter"] = (200, [{"flow_id": "f", "name": "inline"}])
    server.answers["POST /flows/filter"] = (200, [{"id": "f", "name": "pipeline"}])
    assert rest_api.deployments(server.url) == ["pipeline/inline"]


def test_a_change_shows_the_login_and_the_token_against_forgery(server: Server) -> None:
    server.answers["GET /csrf-token"] = (200, {"token": "t0ken"})
    server.answers["POST /flow_runs/filter"] = (200, [])
    api = rest_api.Api(server.url, "serin:secret")
    assert rest_api.call(api, "POST", "/flow_runs/filter", {}) == []
    asking, changing = server.headers
    assert asking["authorization"] == changing["authorization"] == "Basic c2VyaW46c2VjcmV0"
    assert server.asked[0][0] == f"GET /csrf-token?client={changing['prefect-csrf-client']}"
    assert changing["prefect-csrf-token"] == "t0ken"
    assert "secret" not in repr(api)


@pytest.mark.parametrize(
    ("login", "key", "shown"),
    [
        (None, "pnu_1", "Bearer pnu_1"),
        ("serin:secret", "pnu_1", "Basic c2VyaW46c2VjcmV0"),
        (None, None, None),
    ],
)
def test_a_key_is_shown_where_there_is_no_login(
    server: Server, login: str | None, key: str | None, shown: str | None
) -> None:
    server.answers["GET /version"] = (200, "3")
    api = rest_api.Api(server.url, login, key)
    rest_api.call(api, "GET", "/version")
    assert server.headers[-1].get("authorization") == shown
    assert "pnu_1" not in repr(api)


def test_a_token_is_asked_for_once_and_again_when_it_is_worn(server: Server) -> None:
    server.answers["GET /csrf-token"] = (200, {"token": "first"})
    server.answers["POST /flow_runs/filter"] = (200, [])
    for _ in range(3):
        rest_api.call(server.url, "POST", "/flow_runs/filter", {})
    assert [call.partition("?")[0] for call, _ in server.asked].count("GET /csrf-token") == 1
    server.answers["GET /csrf-token"] = (200, {"token": "second"})
    server.answers["POST /flow_runs/filter"] = (403, {"detail": "Invalid CSRF token or client identifier."})
    with pytest.raises(PrefectRefused, match="Invalid CSRF"):
        rest_api.call(server.url, "POST", "/flow_runs/filter", {})
    sent = [headers.get("prefect-csrf-token") for headers in server.headers]
    assert sent == [None, "first", "first", "first", "first", None, "second"]


def test_a_wrong_login_is_refused_and_not_shown(server: Server) -> None:
    server.answers["GET /csrf-token"] = (401, {"exception_message": "Unauthorized"})
    with pytest.raises(PrefectRefused, match="does not accept the login: it is wrong") as refusal:
        rest_api.call(rest_api.Api(server.url, "serin:wrong-one"), "POST", "/flow_runs/filter", {})
    assert "wrong-one" not in str(refusal.value)


def test_a_server_without_such_tokens_gets_none(server: Server) -> None:
    server.answers["GET /csrf-token"] = (422, {"detail": "CSRF protection is disabled."})
    server.answers["POST /flow_runs/filter"] = (200, [])
    assert rest_api.call(server.url, "POST", "/flow_runs/filter", {}) == []
    assert "prefect-csrf-token" not in server.headers[-1]


def test_what_schedules_have_planned_does_not_take_the_place_of_runs(server: Server) -> None:
    server.answers["POST /flow_runs/filter"] = (200, [])
    assert rest_api.flow_runs(server.url, limit=5, name="calm-owl") == []
    (asked,) = [body for call, body in server.asked if call == "POST /flow_runs/filter"]
    before = datetime.fromisoformat(asked["flow_runs"]["expected_start_time"]["before_"])
    assert before < datetime.now(UTC) + timedelta(minutes=5)
    assert asked["flow_runs"]["name"] == {"any_": ["calm-owl"]}


def _pool(name: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    template = json.loads(deploy.pool_template(name).read_text())
    return 200, {"type": "serin", "base_job_template": template, "concurrency_limit": None, **changes}


def test_pools_are_written_only_where_they_differ(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "inventory", lambda: [object(), object()])
    server.answers["GET /work_pools/cpu"] = _pool("cpu")
    server.answers["GET /work_pools/gpu"] = _pool("gpu")
    deploy.make_pools(Api(server.url))
    assert [call for call, _ in server.asked] == ["GET /work_pools/cpu", "GET /work_pools/gpu"]

    server.answers["POST /work_pools/"] = (409, {"detail": "exists"})
    server.answers["PATCH /work_pools/cpu"] = server.answers["PATCH /work_pools/gpu"] = (204, None)
    monkeypatch.setattr(deploy, "inventory", list)  # the GPUs were removed
    server.answers["GET /work_pools/cpu"] = _pool(
        "cpu", base_job_template={"variables": {}}
    )  # another Serin's
    deploy.make_pools(Api(server.url))
    written = {call: body for call, body in server.asked if call.startswith("PATCH")}
    assert written["PATCH /work_pools/gpu"]["concurrency_limit"] == 1
    assert written["PATCH /work_pools/cpu"]["base_job_template"] == _pool("cpu")[1]["base_job_template"]


def test_deployments_are_applied_once_and_again_when_their_sources_changed(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    applied: list[str] = []
    digest = "first"
    monkeypatch.setattr(deploy, "deployments_digest", lambda: digest)
    monkeypatch.setattr(deploy, "apply_file", lambda *_: applied.append(digest))
    server.answers["POST /deployments/filter"] = (200, [{"flow_id": "1", "name": "inline"}])
    server.answers["POST /flows/filter"] = (200, [{"id": "1", "name": "pipeline"}])
    stack = Stack(home=tmp_path, gateway_port=1, prefect_api_url=server.url, prefect_port=1)
    for _ in range(2):
        assert deploy.apply_deployments(stack, {}) == ["pipeline/inline"]
    assert applied == ["first"]
    digest = "second"
    deploy.apply_deployments(stack, {})
    assert applied == ["first", "second"]
    server.answers["POST /deployments/filter"] = (200, [])  # the database was replaced
    deploy.apply_deployments(stack, {})
    assert applied == ["first", "second", "second"]
    deploy.apply_deployments(stack, {}, again=True)
    assert len(applied) == 4


def test_processes_for_runs_wait_with_their_imports_until_the_stack_is_up(tmp_path: Path) -> None:
    assert not processes.is_starting(tmp_path)  # no stack here: a worker on another host
    gate = processes.workers_gate(tmp_path)
    gate.parent.mkdir(parents=True)
    gate.touch()
    assert processes.is_starting(tmp_path)
    processes.note_up(tmp_path)
    assert not processes.is_starting(tmp_path)
