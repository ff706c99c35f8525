"""The pipeline on a real stack: Prefect places it, a killed training goes on, Triton serves what came out.

One story in one test, since every part of it needs what the part before has built.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq
import pytest

from serin.environment import application_folder
from serin.formats.bundle import read_manifest
from serin.formats.trained import RECORD
from serin.leases import holders
from serin.stack.prefect_api import call
from serin.stack.state import running_stack
from serin.stack.supervisor import Supervisor
from serin.stack.survivors import run_processes
from serin.store import Store
from tests.chaos.pipelines import TRAIN
from tests.e2e.browser import find_browser, open_browser
from tests.fakes.gpus import write_inventory
from tests.fakes.small_pipeline import NAME, small_spec, write_spec

T = TypeVar("T")
TELL_OF_THE_RUN = {"gate.json", "card.md"}  # times that were measured, and which run it was
ROLLOUT = {"steps": [50, 100], "step_time": "0s", "min_requests": 0, "bake": "0s", "deadline": "30s"}
LONG_TRAINING = {
    "epochs": 4,
    "batch_rows": 16,
    "learning_rate": 0.01,
    "seed": 3,
    "checkpoint_every_steps": 50,
}


class Stack:
    """One stack in a folder of its own, spoken to by the command alone."""

    def __init__(self, home: Path) -> None:
        self.home = home
        inventory = str(write_inventory(home, ()))  # GPUs are pretended where one is needed: none at first
        self.environment = {**os.environ, "SERIN_HOME": str(home), "SERIN_INVENTORY": inventory}
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "serin.cli", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def serin(self, *arguments: str, seconds: float = 600.0) -> str:
        process = self.start(*arguments)
        try:
            said, _ = process.communicate(timeout=seconds)
        finally:
            process.kill()
        assert process.returncode == 0, (
            f"serin {' '.join(arguments)} ended with {process.returncode}:\n{said}"
        )
        return said

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return call(running_stack(self.home).api, method, path, body)

    def state(self, run: str) -> str:
        return str(self.call("GET", f"/flow_runs/{run}")["state_type"])

    def begin(self, spec: Path, *options: str) -> str:
        """The id of a new run."""
        said = self.serin("run", str(spec), "--no-follow", *options)
        return next(word.rpartition("/")[2] for word in said.split() if "/runs/flow-run/" in word)

    def training(self) -> Path | None:
        found = sorted((self.home / "runs").glob("train-*"))
        return found[0] if found else None

    def runs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.serin("runs", "list", "--json"))
        return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("stack") / "home")
    made.serin("up")
    yield made
    made.serin("down")


@pytest.mark.timeout(1500)
def test_a_killed_training_goes_on_and_the_pipeline_ends_in_a_served_model(
    stack: Stack, tmp_path: Path
) -> None:
    sections = {"training": LONG_TRAINING, "rollout": ROLLOUT}
    spec = write_spec(tmp_path, small_spec(tmp_path / "data", rows=12000, **sections))

    began = time.monotonic()
    run = stack.start("run", str(spec))
    killed = _kill_a_training_worker(stack, run)
    said, _ = run.communicate(timeout=600)
    assert run.returncode == 0, said
    print(f"first run, killed at step {killed}: {time.monotonic() - began:.1f} s")
    _was_resumed(stack, killed)

    _answers_as_it_was_trained(stack, tmp_path)

    began = time.monotonic()
    stack.serin("run", str(spec))
    print(f"second run, nothing changed: {time.monotonic() - began:.1f} s")
    assert _versions(stack) == [1]

    began = time.monotonic()
    killed_run = _kill_a_placed_pipeline_and_its_worker(stack, spec)
    print(f"found and marked as crashed: {time.monotonic() - began:.1f} s after it was asked for")
    stack.serin("run", "--resume", killed_run)
    print(f"placed run of one stage, killed and resumed: {time.monotonic() - began:.1f} s")
    assert _versions(stack) == [1, 2]
    kinds = [
        found["kind"] for found in stack.runs() if found["kind"] in ("pipeline", "etl", "train", "export")
    ]
    assert sorted(kinds) == ["export", "pipeline", "pipeline", "pipeline"]  # no machine for what was known

    _left_no_secret_and_no_pickle(stack)


@pytest.mark.timeout(1500)
def test_a_person_sees_the_run_its_pages_with_pictures_and_a_form_for_the_spec(
    stack: Stack, tmp_path: Path
) -> None:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium here (`make system-deps` installs it): Prefect's pages were not looked at")
    if not _versions(stack):  # alone, without the story above
        stack.serin("run", "--no-serve", str(write_spec(tmp_path, small_spec(tmp_path / "data"))))
    api, pages = running_stack(stack.home).api, running_stack(stack.home).prefect_ui_url
    artifacts = {
        found["key"]: found["latest_id"] for found in call(api, "POST", "/artifacts/latest/filter", {})
    }
    body = {"flows": {"name": {"any_": ["pipeline"]}}, "sort": "START_TIME_ASC"}
    run = call(api, "POST", "/flow_runs/filter", body)[0]
    assert NAME in run["tags"]
    with open_browser(program, tmp_path / "browser") as page:
        page.open(f"{pages}/artifacts")
        page.type_into("input[type=password]", (stack.home / "prefect-login").read_text().strip())
        page.press("Login")
        page.wait_for(*(f"{NAME}-{stage}" for stage in ("data", "training", "gate")))
        for stage, words in (("data", "Features"), ("training", "valid_auc"), ("gate", "Variants")):
            page.open(f"{pages}/artifacts/artifact/{artifacts[f'{NAME}-{stage}']}")
            page.wait_for(NAME, words)
            page.wait_until(_SHOWS_A_PICTURE, f"a picture on the page of {stage}")
            page.picture(tmp_path / f"{stage}.png")

        page.open(f"{pages}/runs/flow-run/{run['id']}")
        page.wait_for(run["name"], NAME, "Completed", f"published {NAME}-v1", "training on the CPU")
        assert page.picture(tmp_path / "run.png").startswith(b"\x89PNG")

        page.open(f"{pages}/deployments/deployment/{run['deployment_id']}/run")
        page.wait_for("spec", "fresh", "Validate parameters")
        page.press("PipelineSpec")
        page.wait_for("TrainingSpec", "RolloutSpec", "MonitoringSpec")
        page.picture(tmp_path / "form.png")


@pytest.mark.timeout(1500)
def test_a_placed_pipeline_gives_the_same_artifacts_as_one_process(stack: Stack, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, small_spec(tmp_path / "data") | {"name": "same-parcels"})
    stack.serin("run", "--placed", "--no-serve", str(spec))

    elsewhere, api = tmp_path / "elsewhere", running_stack(stack.home).api
    program = (
        "import asyncio, sys; from flows.pipeline import pipeline; "
        "asyncio.run(pipeline(sys.argv[1], serve=False))"
    )
    variables = {
        "SERIN_HOME": str(elsewhere),
        "PREFECT_API_URL": api.url,
        "PREFECT_API_AUTH_STRING": api.login,
    }
    done = subprocess.run(
        [sys.executable, "-c", program, str(spec)],
        env=stack.environment | variables, cwd=application_folder(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout

    placed, inline = (_made_in(home) for home in (stack.home, elsewhere))
    assert placed == inline
    assert placed["model"], "nothing was compared"


@pytest.mark.timeout(1500)
def test_who_cancels_a_placed_pipeline_cancels_its_stage_and_frees_the_gpu(
    stack: Stack, tmp_path: Path
) -> None:
    write_inventory(stack.home, ("GPU-a",))
    (tmp_path / "train.py").write_text(TRAIN)
    sections = {
        "model": {"script": "train.py", "options": {"steps": 100_000}},
        "training": {"epochs": 1, "processes": 1},
    }
    spec = write_spec(tmp_path, small_spec(tmp_path / "data", **sections) | {"name": "cancelled-parcels"})
    run = stack.begin(spec, "--placed", "--no-serve")
    stage = _wait(lambda: _training(stack, run), "the training holds its GPU")
    engine = _wait(lambda: _only_engine(stack, stage), "the training's one engine")
    assert b"deployments.engine" in Path(f"/proc/{engine}/cmdline").read_bytes(), (
        "no process had waited for it"
    )

    state = {
        "type": "CANCELLING",
        "name": "Cancelling",
    }  # what Prefect's page and `prefect flow-run cancel` say
    stack.call("POST", f"/flow_runs/{run}/set_state", {"state": state})
    _wait(lambda: {stack.state(run), stack.state(stage)} == {"CANCELLED"}, "both are cancelled")
    _wait(lambda: not {run, stage} & run_processes(stack.home).keys(), "no process of theirs is left")
    assert holders(stack.home) == ()
    assert Store(str(stack.home / "store")).versions("cancelled-parcels") == []


def _only_engine(stack: Stack, run: str) -> int | None:
    """A child that it starts looks like the engine itself until it has become another program."""
    engines = run_processes(stack.home)[run].engines
    return engines[0] if len(engines) == 1 else None


def _training(stack: Stack, run: str) -> str | None:
    """The training's run, once it holds a GPU."""
    body = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "flows": {"name": {"any_": ["train"]}}}
    found = stack.call("POST", "/flow_runs/filter", body)
    return str(found[0]["id"]) if found and holders(stack.home) else None


def _made_in(home: Path) -> dict[str, Any]:
    """Digests of all that one pipeline has left, by what they are of."""
    store = Store(str(home / "store"))
    (version,) = store.versions("same-parcels")
    manifest = read_manifest(Path(store.bundle("same-parcels", version).path))
    weights = home / "runs" / manifest.lineage["training"] / "result" / RECORD
    return {
        "dataset": manifest.lineage["dataset"],
        "model": json.loads(weights.read_text())["weights_sha256"],
        "version": version,
        "metrics": manifest.metrics,
        "bundle": {name: file.sha256 for name, file in manifest.files.items() if name not in TELL_OF_THE_RUN},
        "files": sorted(manifest.files),
    }


_SHOWS_A_PICTURE = "[...document.images].some(i => i.src.startsWith('data:image/') && i.naturalWidth > 200)"


def _kill_a_placed_pipeline_and_its_worker(stack: Stack, spec: Path) -> str:
    """Both with -9, while a stage runs that it has placed: nobody is left to say that it ended. The run's name, once
    the stack has found out."""
    run = stack.begin(spec, "--placed", "--fresh", "export")
    _wait(lambda: _has_placed_a_stage(stack, run), "the stage's process beside the pipeline's")
    victims = run_processes(stack.home)[run].engines
    worker = Supervisor(stack.home).pid("worker-cpu")
    assert worker is not None
    for victim in (worker, *victims):
        os.kill(victim, signal.SIGKILL)
    found = _wait(
        lambda: next((each for each in stack.runs() if each["state"] == "crashed"), None),
        "it is marked as crashed",
    )
    name: str = found["name"]
    told = stack.serin("runs", "show", name)
    assert "its process is gone" in told
    assert "train        did not run" in told
    return name


def _has_placed_a_stage(stack: Stack, run: str) -> bool:
    """And both have a process; others may not be gone yet."""
    body = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}}
    stages = {str(found["id"]) for found in stack.call("POST", "/flow_runs/filter", body)}
    found = run_processes(stack.home)
    return run in found and bool(found[run].engines and stages & found.keys())


def _wait(look: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + 180
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not in time"
        time.sleep(0.1)
    return found


def _kill_a_training_worker(stack: Stack, run: subprocess.Popen[str]) -> int:
    """kill -9 as soon as there is a checkpoint to go on from; the step of that checkpoint."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert run.poll() is None, run.communicate()[0]
        folder = stack.training()
        saved = sorted(folder.glob("checkpoints/step-*/COMPLETE")) if folder else []
        worker = _worker_of(folder) if folder and saved else None
        if worker:
            os.kill(worker, signal.SIGKILL)
            return int(saved[-1].parent.name.removeprefix("step-"))
        time.sleep(0.02)
    raise AssertionError("no training worker with a checkpoint within 300 s")


def _worker_of(folder: Path) -> int | None:
    """The process that trains in `folder`."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "serin.training.worker" in words and str(folder) in words:
            return int(entry.name)
    return None


def _was_resumed(stack: Stack, killed: int) -> None:
    folder = stack.training()
    assert folder is not None
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    starts = [line["step"] for line in lines if line["event"] == "started"]
    assert starts[0] == 0
    assert len(starts) == 2, "killed once, so started twice"
    assert starts[1] >= killed > 0


def _answers_as_it_was_trained(stack: Stack, tmp_path: Path) -> None:
    """Through the gateway, and right more often than a coin."""
    table = pq.read_table(tmp_path / "data" / "parcels.parquet").slice(0, 200)
    rows, scores = tmp_path / "rows.parquet", tmp_path / "scores.parquet"
    pq.write_table(table.drop_columns(["hours"]), rows)
    stack.serin("predict", NAME, str(rows), "--out", str(scores))
    late = [hours > 30 for hours in table["hours"].to_pylist()]
    guessed = [score > 0.5 for score in pq.read_table(scores)["score"].to_pylist()]
    assert sum(a == b for a, b in zip(late, guessed, strict=True)) > 150


def _left_no_secret_and_no_pickle(stack: Stack) -> None:
    """In nothing that anybody wrote while all this happened; results of runs are JSON."""
    password = (stack.home / "prefect-login").read_text().strip().partition(":")[2].encode()
    places = ("logs/*.log", "releases/logs/*.log", "runs/*/logs/*.log", "gateway/*.log")
    logs = [path for place in places for path in stack.home.glob(place)]
    assert len(logs) >= 5
    assert [path for path in logs if password in path.read_bytes()] == []
    described = list((stack.home / "stack" / "conf.d").iterdir())  # how the supervisor starts them
    assert [path for path in described if path.stat().st_mode & 0o077] == []
    results = [json.loads(path.read_bytes()) for path in (stack.home / "prefect" / "storage").iterdir()]
    assert results


def _versions(stack: Stack) -> list[int]:
    return [entry["version"] for entry in json.loads(stack.serin("models", "list", "--json"))]
