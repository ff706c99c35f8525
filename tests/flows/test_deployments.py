"""Deployments on a real server can be deployed, found and imported; and what a stage does again and what not."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.settings import get_current_settings

from flows.pipeline import pipeline
from flows.stages import export
from serin import Pipeline
from serin.formats.bundle import read_manifest
from serin.host.state import POOLS
from serin.machine import environment
from serin.machine.environment import application_folder
from serin.machine.leases import holders
from serin.pipeline.etl import find_dataset
from serin.pipeline.run_stage import run_etl, run_export, run_train
from serin.pipeline.train import find_checkpoint
from serin.prefect import rest_api
from serin.spec.load import load_spec
from serin.store.artifacts import Bundle, Checkpoint, Dataset
from serin.store.receipt import Receipt
from serin.store.stage_keys import notes
from serin.store.stage_results import receipt_file
from serin.store.store import Store
from tests.fakes.small_pipeline import NAME, small_spec
from tests.kit.commands import run

FILE = application_folder() / "deployments" / "prefect.yaml"
WANTED = {
    "etl/placed": "cpu",
    "etl/placed-gpu": "gpu",
    "export/placed": "cpu",
    "export/placed-gpu": "gpu",
    "pipeline/inline": "cpu",
    "pipeline/placed": "cpu",
    "reconcile/on-demand": "cpu",
    "refresh_lookups/scheduled": "cpu",
    "retrain/scheduled": "cpu",
    "roll_out/on-demand": "cpu",
    "score/scheduled": "cpu",
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
    variables = environment.child_environment(PREFECT_API_URL=url)
    run(sys.executable, "-m", "prefect", *words, cwd=application_folder(), env=variables)
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
    ((lookups, _),) = scheduled.pop("refresh_lookups/scheduled")
    assert lookups["interval"] == 900.0
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
    variables = environment.child_environment(PYTHONPATH=str(tmp_path), PREFECT_API_URL=api)
    command = sys.executable, "-c", program, json.dumps(steps[0]), *entrypoints
    done = run(*command, cwd=tmp_path, env=variables)
    loaded = dict(word.split("=") for word in done.stdout.split() if "=" in word)
    assert loaded == {
        "flows.pipeline.pipeline": "pipeline",
        "flows.placed.pipeline": "pipeline",
        "flows.reconcile.reconcile": "reconcile",
        "flows.refresh_lookups.refresh_lookups": "refresh_lookups",
        "flows.retrain.retrain": "retrain",
        "flows.roll_out.roll_out": "roll_out",
        "flows.score.score": "score",
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


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Iterator[dict[str, Any]]:
    """A spec whose pipeline has run once."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERIN_HOME", str(folder / "home"))
        made = small_spec(folder / "data")
        assert told(made) == {
            "etl": (True, "no earlier result"),
            "train": (True, "no earlier result"),
            "export": (True, "no earlier result"),
        }
        yield made


def told(spec: dict[str, Any], **parameters: Any) -> dict[str, tuple[bool, str]]:
    """Which stages ran in a run of the pipeline, and why or why not."""
    state = asyncio.run(pipeline(spec, serve=False, return_state=True, **parameters))
    assert state.is_completed(), state.message
    run = str(state.state_details.flow_run_id)
    return {entry["stage"]: (entry["ran"], entry["why"]) for entry in notes(environment.home(), run)}


def versions() -> list[int]:
    return Store.open().versions(NAME)


def test_nothing_changed_and_nothing_is_done(spec: dict[str, Any]) -> None:
    found = told(spec)
    assert {stage: ran for stage, (ran, _) in found.items()} == {
        "etl": False,
        "train": False,
        "export": False,
    }
    assert found["export"][1] == f"exported before: {NAME} version 1"
    assert holders(environment.home()) == ()


def test_a_change_in_export_alone_makes_only_export_run(spec: dict[str, Any]) -> None:
    found = told({**spec, "export": {"variants": ["fp32", "fp16"]}})
    assert {stage: ran for stage, (ran, _) in found.items()} == {"etl": False, "train": False, "export": True}
    assert found["export"][1] == "changed since the last time: export"
    assert versions() == [1, 2]


def test_a_version_whose_maker_died_before_it_could_say_so_is_found_and_not_made_twice(
    spec: dict[str, Any],
) -> None:
    changed = {**spec, "export": {"variants": ["fp32", "fp16"]}}
    for kept in (environment.home() / "stages" / "export").glob("*.json"):
        kept.unlink()
    assert told(changed)["export"] == (False, f"exported before: {NAME} version 2")
    assert versions() == [1, 2]


def test_a_fresh_export_that_is_resumed_makes_one_version(spec: dict[str, Any]) -> None:
    plan = load_spec(spec)
    dataset = find_dataset(plan.data, plan.features)
    assert isinstance(dataset, Dataset)
    checkpoint = find_checkpoint(plan.model, plan.training, dataset)
    assert isinstance(checkpoint, Checkpoint)

    def once(attempt: str) -> Bundle:
        made: Bundle = asyncio.run(export(spec, checkpoint, dataset, fresh=True, attempt=attempt))
        return made

    first, resumed = once("11111111"), once("11111111")
    assert first.version == resumed.version == 3
    assert versions() == [1, 2, 3]


def test_the_shell_finds_what_the_flow_has_made(spec: dict[str, Any]) -> None:
    plan = load_spec(spec)
    found = [run_etl(plan), run_train(plan), run_export(plan)]
    assert [(stage.ran, stage.receipt) for stage in found] == [(False, None)] * 3
    assert found[2].why == f"exported before: {NAME} version {found[2].value.version}"
    assert told(spec)["export"] == (False, found[2].why), "and the flow finds the same version"


def test_a_notebook_finds_what_the_flow_has_made(spec: dict[str, Any]) -> None:
    notebook, plan = Pipeline(spec), load_spec(spec)
    dataset, checkpoint, model = notebook.build_dataset(), notebook.train(), notebook.export()
    assert [stage.ran for stage in (dataset, checkpoint, model)] == [False] * 3
    assert str(dataset.path) == run_etl(plan).value.path
    assert str(checkpoint.path) == run_train(plan).value.path
    assert str(model.path) == run_export(plan).value.path


def test_the_flow_finds_what_the_shell_has_made(spec: dict[str, Any]) -> None:
    changed = {**spec, "training": {**spec["training"], "epochs": 1}}
    plan = load_spec(changed)
    trained, exported = run_train(plan), run_export(plan)
    for stage in (trained, exported):
        assert stage.ran
        assert stage.why.startswith("changed since the last time: ")
        assert stage.receipt.device[0].id == "cpu"
    stages = environment.home() / "stages"
    made = exported.value
    key = read_manifest(Path(made.path)).lineage["export"]
    assert (stages / "export" / f"{key}.lock").exists()
    assert Receipt.load_file(receipt_file(environment.home(), "export", key)) == exported.receipt
    assert told(changed) == {
        "etl": (False, run_etl(plan).why),
        "train": (False, f"trained before: {trained.value.path}"),
        "export": (False, f"exported before: {NAME} version {made.version}"),
    }


def test_a_fresh_dataset_is_made_again_and_what_follows_is_found(spec: dict[str, Any]) -> None:
    found = told(spec, fresh=("etl",))
    assert {stage: ran for stage, (ran, _) in found.items()} == {"etl": True, "train": False, "export": False}
    assert found["etl"][1] == "asked for by --fresh"


def test_the_stages_of_a_run_can_be_asked_for_when_its_folder_is_gone(
    spec: dict[str, Any], tmp_path: Path
) -> None:
    assert notes(tmp_path, "no-such-run") == []
