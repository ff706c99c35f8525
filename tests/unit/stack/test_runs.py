"""`serin runs` of a stack that works with a Prefect server of somebody else."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serin.cli import app
from serin.machine.process_identity import start_ticks
from serin.stack.host.state import Stack, write_stack
from serin.store.runs import name_model, run_folder
from tests.fakes.prefect import Server, prefect_at_work

RUN = {
    "id": "7",
    "name": "brave-owl",
    "flow_id": "f",
    "state_type": "COMPLETED",
    "state_name": "Completed",
    "state": {"message": "well done"},
    "start_time": "2026-11-15T10:00:00+00:00",
    "estimated_run_time": 3.0,
    "tags": ["serin", "flights"],
    "parameters": {"spec": "spec.yaml"},
}


@pytest.fixture
def company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server, and a stack in this home that is up and works with it. (The stack's process is this one.)"""
    monkeypatch.setenv("SERIN_HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_API_KEY", "key-of-the-caller")
    with prefect_at_work() as server:
        server.answers = {
            "POST /flows/filter": (200, [{"id": "f", "name": "pipeline"}]),
            "POST /flow_runs/filter": (200, [RUN]),
            "POST /logs/filter": (200, [{"timestamp": "2026-11-15T10:00:01.5", "message": "published"}]),
        }
        pid = os.getpid()
        write_stack(
            Stack(
                home=tmp_path,
                supervisor_pid=pid,
                supervisor_ticks=start_ticks(pid) or 0,
                gateway_port=1,
                prefect_api_url=server.url,
                prefect_port=None,
                since=0.0,
            )
        )
        yield server


def serin(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_company_server_is_asked_for_the_runs_of_our_pools_as_the_caller(company: Server) -> None:
    (run,) = json.loads(serin("runs", "list", "--json"))
    assert (run["name"], run["kind"], run["state"]) == ("brave-owl", "pipeline", "completed")
    assert run["model"] == "flights"
    bodies = [body for call, body in company.asked if call == "POST /flow_runs/filter"]
    assert [body["work_pools"] for body in bodies] == [{"name": {"any_": ["cpu", "gpu"]}}]
    assert {headers.get("authorization") for headers in company.headers} == {"Bearer key-of-the-caller"}


def test_one_run_on_a_company_server_is_shown_with_its_log(company: Server) -> None:
    told = serin("runs", "show", "brave-owl")
    assert "well done" in told
    assert "published" in told


def test_a_training_carries_the_name_of_its_model(home: Path) -> None:
    for name, model in (("train-1", "churn"), ("train-0", None)):
        folder = run_folder(home, name, create=True)
        if model:
            name_model(folder, "other")
            name_model(folder, model)
    listed = json.loads(serin("runs", "list", "--json"))
    assert {run["name"]: run["model"] for run in listed} == {"train-1": "churn", "train-0": None}
    assert json.loads(serin("runs", "show", "train-1", "--json"))["model"] == "churn"


def test_a_run_that_a_schedule_has_started_is_of_no_model_called_auto_scheduled(company: Server) -> None:
    company.answers["POST /flow_runs/filter"] = (200, [{**RUN, "tags": ["serin", "auto-scheduled"]}])
    assert json.loads(serin("runs", "list", "--json"))[0]["model"] is None
