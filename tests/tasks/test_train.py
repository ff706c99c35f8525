"""How the training task finds, places and leases; the training itself is launch's business."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from prefect import flow

from serin.errors import CodeChanged
from serin.machine import environment
from serin.machine.leases import holders
from serin.pipeline import stage
from serin.pipeline import train as use_case
from serin.pipeline.train import find_checkpoint
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Checkpoint, Dataset
from serin.training.launch.run_dir import devices_wanted, training_folder
from tasks.train import train_model

MODEL, TRAINING = ModelSpec(hidden=(8,)), TrainingSpec(epochs=2)
DATASET = Dataset(path="/datasets/1", digest="0123abcd", rows={"train": 8, "valid": 1, "test": 1})


class FakeLaunch:
    """Trains in no time, and notes who held which GPU meanwhile."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.folders: list[Path] = []
        self.held: list[list[str]] = []
        self.devices: tuple[str, ...] = ()

    def train(self, *_: object, folder: Path, devices: tuple[str, ...], **__: object) -> Checkpoint:
        self.folders.append(folder)
        self.devices = devices
        self.held.append([f"{holder.device} for {holder.purpose}" for holder in holders(self.home)])
        result = folder / "result"
        result.mkdir(exist_ok=True)
        (result / "metrics.json").write_text(json.dumps({"metrics": {}, "epochs": []}))
        return Checkpoint(path=str(result), step=1, metrics={"valid_auc": 0.5})


@pytest.fixture
def launch(home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch(home)
    monkeypatch.setattr(use_case, "launcher", fake)
    return fake


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "inventory.json"
    devices = [{"id": "GPU-a"}, {"id": "GPU-b"}]
    file.write_text(json.dumps({"format": "serin.inventory", "version": 1, "devices": devices}))
    monkeypatch.setenv("SERIN_INVENTORY", str(file))


def train(*, fresh: bool = False) -> Checkpoint:
    @flow
    async def one() -> Checkpoint:
        return await train_model(MODEL, TRAINING, DATASET, name="parcels", fresh=fresh)

    return asyncio.run(one())


def test_the_same_training_has_the_same_folder_and_another_has_its_own(home: Path) -> None:
    here = training_folder(environment.home(), MODEL, TRAINING, DATASET)
    assert training_folder(environment.home(), MODEL, TRAINING, DATASET) == here
    other = Dataset(path=DATASET.path, digest="4567cdef", rows=DATASET.rows)
    assert training_folder(environment.home(), MODEL, TRAINING, other) != here
    assert training_folder(environment.home(), MODEL, TrainingSpec(epochs=3), DATASET) != here


def test_how_many_processes_train_does_not_make_it_another_training(home: Path) -> None:
    here = training_folder(environment.home(), MODEL, TRAINING, DATASET)
    wider = TRAINING.model_copy(update={"processes": 2, "checkpoint_every_steps": 7})
    assert training_folder(environment.home(), MODEL, wider, DATASET) == here


def test_a_training_that_was_done_is_found(prefect_server: None, launch: FakeLaunch) -> None:
    first = train()
    assert train() == first
    assert len(launch.folders) == 1


def test_a_result_that_is_gone_is_not_found(home: Path, prefect_server: None, launch: FakeLaunch) -> None:
    checkpoint = train()
    assert find_checkpoint(MODEL, TRAINING, DATASET) == checkpoint
    (Path(checkpoint.path) / "metrics.json").unlink()
    Path(checkpoint.path).rmdir()
    assert find_checkpoint(MODEL, TRAINING, DATASET) is None


def test_a_fresh_training_starts_in_its_own_folder_and_is_found_later(
    prefect_server: None, launch: FakeLaunch
) -> None:
    first = train()
    second = train(fresh=True)
    assert second.path != first.path
    assert train() == second
    assert len(launch.folders) == 2


def test_code_that_changes_while_its_training_waits_for_a_gpu_is_not_trained_under_the_old_name(
    tmp_path: Path, home: Path, launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "own_train.py"
    script.write_text("import sys\n")
    model = ModelSpec(script=str(script))
    real = stage.lease

    def wait_while_it_is_edited(*given: object, **named: object) -> object:
        script.write_text("import sys, os\n")
        return real(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "lease", wait_while_it_is_edited)
    with pytest.raises(CodeChanged, match="run it again") as raised:
        use_case.train_model(model, TRAINING, DATASET, name="parcels")
    assert raised.value.retryable
    assert launch.folders == []


def test_a_cancelled_run_tells_its_training_to_save_and_end(
    prefect_server: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, told = threading.Event(), threading.Event()

    def train_for_ever(*_: object, stop: threading.Event, **__: object) -> None:
        began.set()
        if stop.wait(120):
            told.set()

    monkeypatch.setattr(use_case.launcher, "train", train_for_ever)

    @flow
    async def cancelled() -> None:
        training = asyncio.create_task(train_model(MODEL, TRAINING, DATASET, name="parcels"))
        await asyncio.to_thread(began.wait, 120)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)

    asyncio.run(cancelled())
    assert told.is_set()


def test_gpus_are_leased_while_the_training_runs_and_free_afterwards(
    home: Path, prefect_server: None, launch: FakeLaunch, two_gpus: None
) -> None:
    train()
    assert launch.devices == ("GPU-a", "GPU-b")
    assert launch.held == [["GPU-a for training of parcels", "GPU-b for training of parcels"]]
    assert holders(home) == ()


def test_as_many_gpus_as_processes_are_wanted(two_gpus: None) -> None:
    assert devices_wanted(ModelSpec(), TrainingSpec(processes=1)) == 1
    assert devices_wanted(ModelSpec(), TrainingSpec(processes="auto")) == 2
    assert devices_wanted(ModelSpec(), TrainingSpec(processes=2, processes_per_gpu=2)) == 1
    assert devices_wanted(ModelSpec(), TrainingSpec(processes=3, processes_per_gpu=2)) == 2
    assert devices_wanted(ModelSpec(), TrainingSpec(processes="auto", processes_per_gpu=2)) == 2


def test_no_gpu_is_wanted_where_there_is_none() -> None:
    assert devices_wanted(ModelSpec(), TrainingSpec(processes=2)) == 0
