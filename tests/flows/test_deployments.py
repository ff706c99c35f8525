"""deployments/prefect.yaml on a real server: everything in it can be deployed, found and imported."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings import get_current_settings

from serin.machine import environment
from serin.machine.application import application_folder
from serin.stack.prefect import rest_api
from serin.stack.prefect.processes import POOLS

FILE = application_folder() / "deployments" / "prefect.yaml"
WANTED = {
    "etl/placed": "cpu",
    "etl/placed-gpu": "gpu",
    "export/placed": "cpu",
    "export/placed-gpu": "gpu",
    "pipeline/inline": "cpu",
    "pipeline/placed": "cpu",
    "reconcile/on-demand": "cpu",
    "retrain/scheduled": "cpu",
    "roll_out/on-demand": "cpu",
    "search/on-demand": "gpu",
    "train/placed": "gpu",
    "watch/scheduled": "cpu",
}


@pytest.fixture(scope="module")
def api(prefect_server: None) -> str:
    """The server, after `prefect deploy` as a person would type it."""
    url = str(get_current_settings().api.url)
    for pool in POOLS:
        template = json.loads((FILE.parent / f"{pool}-pool.json").read_text())
        rest_api.ensure_pool(url, pool, kind="serin", template=template, slots=None)
    words = ["--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml"]
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *words],
        cwd=application_folder(),
        env=environment.child_environment(PREFECT_API_URL=url),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return url


def deployments(api: str) -> dict[str, dict[str, Any]]:
    flows = {flow["id"]: flow["name"] for flow in rest_api.call(api, "POST", "/flows/filter", {})}
    found = rest_api.call(api, "POST", "/deployments/filter", {})
    return {f"{flows[entry['flow_id']]}/{entry['name']}": entry for entry in found}


def test_every_deployment_is_there_and_in_its_pool(api: str) -> None:
    assert {name: found["work_pool_name"] for name, found in deployments(api).items()} == WANTED


def test_the_watch_runs_every_five_minutes_and_the_retraining_every_night(api: str) -> None:
    """That they do is seen in tests/chaos/schedules.py: the server here plans nothing."""
    scheduled = {
        name: [(schedule["schedule"], schedule["parameters"]) for schedule in found["schedules"]]
        for name, found in deployments(api).items()
        if found["schedules"]
    }
    ((watch, _),) = scheduled.pop("watch/scheduled")
    assert watch["interval"] == 300.0
    ((nightly, parameters),) = scheduled.pop("retrain/scheduled")
    assert (nightly["cron"], nightly["timezone"], parameters) == ("0 2 * * *", "UTC", {"why": "nightly"})
    assert scheduled == {}


def test_a_run_finds_its_code_from_any_folder(api: str, tmp_path: Path) -> None:
    """The pull steps and every entrypoint, in a process that starts elsewhere and knows only where serin is."""
    (tmp_path / "serin").symlink_to(application_folder() / "serin")
    found = deployments(api)
    steps = [entry["pull_steps"] for entry in found.values()]
    assert all(each == steps[0] for each in steps)
    entrypoints = sorted(entry["entrypoint"] for entry in found.values())
    program = (
        "import asyncio, json, sys; from prefect.deployments.steps.core import run_steps; "
        "from prefect.flows import load_flow_from_entrypoint as load; "
        "asyncio.run(run_steps(json.loads(sys.argv[1]))); "
        "print(*[f'{e}={load(e, use_placeholder_flow=False).name}' for e in sys.argv[2:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(steps[0]), *entrypoints],
        cwd=tmp_path,
        env=environment.child_environment(PYTHONPATH=str(tmp_path), PREFECT_API_URL=api),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    loaded = dict(word.split("=") for word in done.stdout.split() if "=" in word)
    assert loaded == {
        "flows.pipeline.pipeline": "pipeline",
        "flows.placed.pipeline": "pipeline",
        "flows.reconcile.reconcile": "reconcile",
        "flows.retrain.retrain": "retrain",
        "flows.roll_out.roll_out": "roll_out",
        "flows.search.search": "search",
        "flows.stages.etl": "etl",
        "flows.stages.export": "export",
        "flows.stages.train": "train",
        "flows.watch.watch": "watch",
    }


def test_the_parameters_of_both_pipelines_are_the_same(api: str) -> None:
    found = deployments(api)
    inline, placed = (
        found[f"pipeline/{name}"]["parameter_openapi_schema"]["properties"] for name in ("inline", "placed")
    )
    assert inline == placed
    assert list(inline) == ["spec", "fresh", "serve", "approved_by", "reason"]


def test_a_stage_that_is_asked_for_wrongly_is_refused_before_it_runs(api: str) -> None:
    placed = deployments(api)["train/placed"]
    wrong = {"parameters": {"spec": "spec.yaml", "dataset": {"path": 1}}}
    with pytest.raises(rest_api.PrefectRefused, match="dataset"):
        rest_api.call(api, "POST", f"/deployments/{placed['id']}/create_flow_run", wrong)


def test_a_spec_that_cannot_be_one_is_refused_before_it_runs(api: str) -> None:
    inline = deployments(api)["pipeline/inline"]
    wrong = {"parameters": {"spec": {"name": "parcels", "trainig": {"epochs": 3}}}}
    with pytest.raises(rest_api.PrefectRefused, match="trainig"):
        rest_api.call(api, "POST", f"/deployments/{inline['id']}/create_flow_run", wrong)


def test_the_flows_are_async() -> None:
    """A synchronous flow costs a second more, each time."""
    import importlib

    for entry in yaml.safe_load(FILE.read_text())["deployments"]:
        module, _, name = entry["entrypoint"].rpartition(".")
        assert asyncio.iscoroutinefunction(getattr(importlib.import_module(module), name).fn), name
