"""What a start finds done already is not done again, and what has changed is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serin.stack.host.state import Stack
from serin.stack.prefect import deploy, processes
from serin.stack.prefect.rest_api import Api
from tests.fakes.prefect import Server, prefect_at_work


@pytest.fixture
def server() -> Iterator[Server]:
    with prefect_at_work() as made:
        yield made


def _pool(name: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    template = json.loads(deploy.pool_template(name).read_text())
    slots = 2 if name == "gpu" else None
    return 200, {"type": "serin", "base_job_template": template, "concurrency_limit": slots, **changes}


def test_pools_are_written_only_where_they_differ(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "inventory", lambda: [object(), object()])
    server.answers["GET /work_pools/cpu"] = _pool("cpu")
    server.answers["GET /work_pools/gpu"] = _pool("gpu")
    deploy.make_pools(Api(server.url))
    assert [call for call, _ in server.asked] == ["GET /work_pools/cpu", "GET /work_pools/gpu"]

    server.answers["POST /work_pools/"] = (409, {"detail": "exists"})
    server.answers["PATCH /work_pools/cpu"] = server.answers["PATCH /work_pools/gpu"] = (204, None)
    monkeypatch.setattr(deploy, "inventory", lambda: [object()])  # a GPU was removed
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
    stack = Stack(
        home=tmp_path, supervisor_pid=1, supervisor_ticks=1, gateway_port=1, prefect_api_url=server.url,
        prefect_port=1, since=0.0,
    )  # fmt: skip
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
