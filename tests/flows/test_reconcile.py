"""Runs whose process is gone, on a real server; what stands for a run's process is a real process with its marks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.settings import get_current_settings

from serin.host.process_scan import record_run
from serin.machine.environment import application_folder
from serin.machine.process import start_ticks
from serin.prefect import reconcile
from serin.prefect.processes import workers_of
from serin.prefect.reconcile import Reconciler, schedule_again
from serin.prefect.rest_api import Api, call, ensure_pool

STOPPED = "Execution was cancelled by the runtime environment."
WAITING = "import sys; print('here', flush=True); sys.stdin.read()"


@pytest.fixture(scope="module")
def api(prefect_server: None) -> Api:
    found = Api(str(get_current_settings().api.url))
    for pool in ("cpu", "gpu"):
        template = json.loads((application_folder() / "deployments" / f"{pool}-pool.json").read_text())
        ensure_pool(found, pool, kind="serin", template=template, slots=None)
    return found


@pytest.fixture
def reconciler(api: Api, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reconciler]:
    """One that waits for nobody; afterwards no run of the test is left under way."""
    monkeypatch.setattr(reconcile, "GRACE_S", 0.0)
    monkeypatch.setattr(reconcile, "GRACE_S", 0.0)
    home.mkdir()
    made = Reconciler(home, api, stack_since=time.time() - 5)
    made.look()  # what other tests have left
    yield made
    made.look()


def begin(api: Api, state: str, *, message: str = "", pool: str = "cpu") -> str:
    """A run in that state, in a deployment of its own; its id."""
    flow = call(api, "POST", "/flows/", {"name": f"flow-{uuid4().hex[:8]}"})
    deployment = call(
        api, "POST", "/deployments/", {"name": "here", "flow_id": flow["id"], "work_pool_name": pool}
    )
    run = call(api, "POST", f"/deployments/{deployment['id']}/create_flow_run", {})
    if state != "PENDING":
        set_state(api, run["id"], "RUNNING")
    set_state(api, run["id"], state, message)
    return str(run["id"])


def set_state(api: Api, run: str, state: str, message: str = "") -> None:
    body = {"state": {"type": state, "name": state.title(), "message": message}, "force": True}
    call(api, "POST", f"/flow_runs/{run}/set_state", body)


def state(api: Api, run: str) -> dict[str, Any]:
    found: dict[str, Any] = call(api, "GET", f"/flow_runs/{run}")["state"]
    return found


@contextmanager
def process(home: Path, run: str, *, engine: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process of the run in the stack of `home`, by the mark in its environment."""
    marks = {**os.environ, "SERIN_STACK": str(home), "PREFECT__FLOW_RUN_ID": run}
    command = [sys.executable, "-c", WAITING]
    child = subprocess.Popen(command, env=marks, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        try:
            assert child.stdout.readline() == "here\n"
            if engine:
                record_run(home, run, child.pid)
            yield child
        finally:
            child.kill()


def test_a_run_is_left_alone_while_its_process_lives_and_crashed_when_it_is_gone(
    reconciler: Reconciler, api: Api, home: Path
) -> None:
    run = begin(api, "RUNNING")
    with process(home, run, engine=True) as engine:
        reconciler.look()
        assert state(api, run)["type"] == "RUNNING"
        engine.kill()
        engine.wait(10)
        (said,) = reconciler.look()
        assert "is crashed: it had no process for" in said
    assert state(api, run)["type"] == "CRASHED"
    assert "its process is gone" in state(api, run)["message"]
    assert reconciler.look() == []


def test_a_run_that_its_process_has_not_begun_yet_is_left_alone(
    reconciler: Reconciler, api: Api, home: Path
) -> None:
    """On a busy machine a process takes its time to begin."""
    run = begin(api, "PENDING")
    with process(home, run, engine=True) as preparing:
        assert reconciler.look() == []
        assert preparing.poll() is None
    assert state(api, run)["type"] == "PENDING"
    call(api, "DELETE", f"/flow_runs/{run}")


def test_the_tasks_of_a_lost_run_end_with_it(reconciler: Reconciler, api: Api) -> None:
    run = begin(api, "RUNNING")
    body = {"flow_run_id": run, "task_key": "train", "dynamic_key": "0", "state": {"type": "RUNNING"}}
    task = call(api, "POST", "/task_runs/", body)
    reconciler.look()
    assert call(api, "GET", f"/task_runs/{task['id']}")["state_type"] == "CRASHED"


def test_a_run_that_was_being_cancelled_is_cancelled(reconciler: Reconciler, api: Api) -> None:
    run = begin(api, "CANCELLING")
    reconciler.look()
    assert state(api, run)["type"] == "CANCELLED"


def test_what_a_dead_run_left_behind_is_ended(reconciler: Reconciler, api: Api, home: Path) -> None:
    run = begin(api, "RUNNING")
    with process(home, run) as orphan:
        said = reconciler.look()
        assert f"ended 1 process(es) that run {run} has left behind" in said
        assert orphan.wait(10) != 0
        assert start_ticks(orphan.pid) is None


def test_a_run_that_was_asked_to_stop_is_queued_again_and_others_that_crashed_are_not(
    reconciler: Reconciler, api: Api
) -> None:
    stopped = begin(api, "CRASHED", message=STOPPED)
    broken = begin(api, "CRASHED", message="Flow run process exited with non-zero status code -9.")
    said = reconciler.look()
    assert len(said) == 1
    assert state(api, stopped)["name"] == "AwaitingRetry"
    assert state(api, broken)["type"] == "CRASHED"
    call(api, "DELETE", f"/flow_runs/{stopped}")


def test_a_run_that_is_asked_to_stop_each_time_is_left_when_that_was_often_enough(
    reconciler: Reconciler, api: Api, home: Path
) -> None:
    """Also when the reconciler has been started anew meanwhile: the server has counted."""
    run = begin(api, "CRASHED", message=STOPPED)
    for number in range(1, reconcile.REQUEUES + 1):
        Reconciler(home, api, stack_since=time.time() - 5).look()
        assert state(api, run)["message"].startswith(f"queued again ({number} of {reconcile.REQUEUES})")
        set_state(api, run, "CRASHED", STOPPED)
    (said,) = reconciler.look()
    assert "not queued again after 3 times: it was asked to stop each time" in said
    assert state(api, run)["type"] == "CRASHED"
    assert state(api, run)["message"] in said
    assert reconciler.look() == []


def test_a_run_that_crashed_while_it_was_being_cancelled_is_cancelled(
    reconciler: Reconciler, api: Api
) -> None:
    """Its worker died between the end of the process and the report."""
    run = begin(api, "CANCELLING")
    set_state(api, run, "CRASHED", STOPPED)
    reconciler.look()
    assert state(api, run)["type"] == "CANCELLED"


def test_a_run_that_is_taken_each_time_and_never_started_ends(
    reconciler: Reconciler, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "_workers", lambda: {"cpu": time.time() + 5})  # another than took it
    run = begin(api, "PENDING")
    for _ in range(reconcile.REQUEUES):
        reconciler.look()
        assert state(api, run)["name"] == "AwaitingRetry"
        set_state(api, run, "PENDING", "")
    reconciler.look()
    assert state(api, run)["type"] == "CRASHED"
    assert "no process of it ever started" in state(api, run)["message"]


def test_on_a_server_of_others_only_what_our_workers_took_is_looked_at(
    reconciler: Reconciler, api: Api, home: Path
) -> None:
    ours, theirs = begin(api, "RUNNING"), begin(api, "RUNNING")
    name = workers_of(home)[0]
    for run, worker in ((ours, name), (theirs, "serin-cpu-elsewhere-0badcafe")):
        call(api, "PATCH", f"/flow_runs/{run}/labels", {"prefect.worker.name": worker})
    Reconciler(home, api, stack_since=time.time() - 5, workers=workers_of(home)).look()
    assert (state(api, ours)["type"], state(api, theirs)["type"]) == ("CRASHED", "RUNNING")
    assert workers_of(home)[0] == name


def test_a_run_that_is_scheduled_again_keeps_its_name_and_waits_for_a_worker(api: Api) -> None:
    run = begin(api, "CRASHED", message="its process is gone")
    schedule_again(api, run, "resumed by ada")
    assert (state(api, run)["type"], state(api, run)["message"]) == ("SCHEDULED", "resumed by ada")
    call(api, "DELETE", f"/flow_runs/{run}")
