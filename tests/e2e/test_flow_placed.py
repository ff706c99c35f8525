"""Placed pipelines on a real stack: the same artifacts as from one process; cancelled with the stage that runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from serin.environment import application_folder
from serin.formats.bundle import read_manifest
from serin.formats.trained import RECORD
from serin.leases import holders
from serin.stack.prefect_api import call
from serin.stack.state import running_stack
from serin.stack.survivors import run_processes
from serin.store import Store
from tests.chaos.pipelines import TRAIN
from tests.fakes.gpus import write_inventory
from tests.fakes.small_pipeline import small_spec, write_spec

T = TypeVar("T")
TELL_OF_THE_RUN = {"gate.json", "card.md"}  # times that were measured, and which run it was
INLINE = "import asyncio, sys; from flows.pipeline import pipeline; asyncio.run(pipeline(sys.argv[1], serve=False))"


class Stack:
    """One stack whose GPUs are pretended: none at first."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {
            **os.environ,
            "SERIN_HOME": str(home),
            "SERIN_INVENTORY": str(write_inventory(home, ())),
        }
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def serin(self, *arguments: str) -> str:
        return run_to_the_end([sys.executable, "-m", "serin.cli", *arguments], self.environment)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return call(running_stack(self.home).api, method, path, body)

    def state(self, run: str) -> str:
        return str(self.call("GET", f"/flow_runs/{run}")["state_type"])

    def begin(self, spec: Path, *options: str) -> str:
        said = self.serin("run", str(spec), "--no-serve", "--no-follow", *options)
        return next(word.rpartition("/")[2] for word in said.split() if "/runs/flow-run/" in word)


def run_to_the_end(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=variables, cwd=application_folder(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{command[2:]}: {done.stdout}"
    return done.stdout


def wait(look: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + 180
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not in time"
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    made = Stack(tmp_path_factory.mktemp("stack") / "home")
    made.serin("up")
    yield made
    made.serin("down")


@pytest.mark.timeout(1500)
def test_a_placed_pipeline_gives_the_same_artifacts_as_one_process(stack: Stack, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, small_spec(tmp_path / "data") | {"name": "same-parcels"})
    stack.serin("run", "--placed", "--no-serve", str(spec))

    elsewhere, api = tmp_path / "elsewhere", running_stack(stack.home).api
    alone = {**stack.environment, "SERIN_HOME": str(elsewhere), "PREFECT_API_URL": api.url}
    run_to_the_end(
        [sys.executable, "-c", INLINE, str(spec)], alone | {"PREFECT_API_AUTH_STRING": api.login or ""}
    )

    placed, inline = (made_in(home) for home in (stack.home, elsewhere))
    assert placed == inline
    assert placed["model"], "nothing was compared"


def made_in(home: Path) -> dict[str, Any]:
    """Digests of all that one pipeline has left, by what they are of."""
    (version,) = Store(str(home / "store")).versions("same-parcels")
    bundle = Store(str(home / "store")).bundle("same-parcels", version)
    manifest = read_manifest(Path(bundle.path))
    (weights,) = home.glob(f"runs/train-*/result/{RECORD}")
    return {
        "dataset": manifest.lineage["dataset"],
        "model": json.loads(weights.read_text())["weights_sha256"],
        "version": version,
        "metrics": manifest.metrics,
        "bundle": {name: file.sha256 for name, file in manifest.files.items() if name not in TELL_OF_THE_RUN},
        "files": sorted(manifest.files),
    }


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
    run = stack.begin(spec, "--placed")
    stage = wait(lambda: _training(stack, run), "the training holds its GPU")

    state = {
        "type": "CANCELLING",
        "name": "Cancelling",
    }  # what Prefect's page and `prefect flow-run cancel` say
    stack.call("POST", f"/flow_runs/{run}/set_state", {"state": state})
    wait(lambda: {stack.state(run), stack.state(stage)} == {"CANCELLED"}, "both are cancelled")
    wait(lambda: not {run, stage} & run_processes(stack.home).keys(), "no process of theirs is left")
    assert holders(stack.home) == ()
    assert Store(str(stack.home / "store")).versions("cancelled-parcels") == []


def _training(stack: Stack, run: str) -> str | None:
    """The training's run, once it holds a GPU."""
    body = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "flows": {"name": {"any_": ["train"]}}}
    found = stack.call("POST", "/flow_runs/filter", body)
    return str(found[0]["id"]) if found and holders(stack.home) else None
