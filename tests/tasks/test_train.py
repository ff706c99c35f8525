"""How tasks find, place, lease, retry and show; the work itself is the core's business."""

import asyncio
import json
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed

from serin.errors import (
    CodeChanged,
    ControllerSilent,
    GateFailed,
    LossNotFinite,
    Preempted,
    SerinError,
    WorkerFailed,
)
from serin.machine import environment
from serin.machine.leases import holders, lease, waiters
from serin.pipeline import stage
from serin.pipeline import train as use_case
from serin.pipeline.train import find_checkpoint
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Checkpoint, Dataset
from serin.store.receipt import measure
from serin.store.waits import Wait
from serin.training.launch import launcher
from serin.training.launch.run_dir import devices_wanted, training_folder
from tasks.markdown import drawing, receipt_table, table
from tasks.retry import error_is_retryable
from tasks.train import train_model
from tests.fakes.datasets import make_dataset
from tests.fakes.gpus import pretend_gpus
from tests.kit.waiting import until
from tests.logs import heard
from tests.unit.training.runs import assert_same_bits, at_the_next_checkpoint

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


def test_an_idle_training_gives_way_to_urgent_work_and_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is pretended: the lease is real, the training is on the CPU, in separate processes."""
    pretend_gpus(tmp_path, monkeypatch, ["GPU-a"])
    monkeypatch.setattr(use_case, "launcher", OnTheCpu)
    dataset = make_dataset(tmp_path / "data")
    training = TrainingSpec(epochs=20, batch_rows=50, precision="fp32", checkpoint_every_steps=100)
    homes = {name: tmp_path / name for name in ("alone", "disturbed")}
    lines: list[str] = []
    folders = {}
    for name, home in homes.items():
        monkeypatch.setenv("SERIN_HOME", str(home))
        folders[name] = training_folder(home, MODEL, training, dataset)
        with heard(lines.append), ExitStack() as disturbance:
            if name == "disturbed":
                urgent = partial(take_urgently, home, lines)
                disturbance.enter_context(at_the_next_checkpoint(folders[name], urgent))
            use_case.train_model(MODEL, training, dataset, name="parcels", priority="idle")
    (gave_way,) = (line for line in lines if "gives way" in line)
    assert "(urgent work)" in gave_way
    taken = lines.index("urgent work has the GPU")
    assert any("resumed at step" in line for line in lines[taken:])
    assert_same_bits(*folders.values())


def test_an_idle_training_that_gave_way_waits_as_long_as_the_urgent_work_takes(
    home: Path, two_gpus: None, launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual patience is none here."""
    monkeypatch.setattr(stage, "lease", partial(lease, wait_s=0.0))
    train_at_once, threads = launch.train, list[threading.Thread]()

    def work_urgently() -> None:
        with lease(2, home=home, priority="urgent", wait_s=60):
            until(lambda: [waiter.purpose for waiter in waiters(home)] == ["training of parcels"])

    def give_way_once(*given: Any, stop: threading.Event, **named: Any) -> Checkpoint:
        if threads:
            return train_at_once(*given, **named)
        threads.append(threading.Thread(target=work_urgently))
        threads[0].start()
        assert stop.wait(60)
        raise Preempted(step=1, folder=named["folder"])

    monkeypatch.setattr(launch, "train", give_way_once)
    use_case.train_model(MODEL, TRAINING, DATASET, name="parcels", priority="idle")
    threads[0].join(60)
    assert len(launch.held) == 1


class OnTheCpu:
    @staticmethod
    def train(*given: Any, devices: tuple[str, ...], **named: Any) -> Checkpoint:
        assert devices == ("GPU-a",)
        return launcher.train(*given, **named)


def take_urgently(home: Path, lines: list[str], _pid: int) -> None:
    with lease(1, home=home, purpose="urgent work", priority="urgent", wait_s=120):
        lines.append("urgent work has the GPU")


def test_as_many_gpus_as_processes_are_wanted(two_gpus: None) -> None:
    assert devices_wanted(ModelSpec(), TrainingSpec(processes=1)) == 1
    assert devices_wanted(ModelSpec(), TrainingSpec(processes="auto")) == 2
    assert devices_wanted(ModelSpec(), TrainingSpec(processes=2, processes_per_gpu=2)) == 1
    assert devices_wanted(ModelSpec(), TrainingSpec(processes=3, processes_per_gpu=2)) == 2
    assert devices_wanted(ModelSpec(), TrainingSpec(processes="auto", processes_per_gpu=2)) == 2


def test_no_gpu_is_wanted_where_there_is_none() -> None:
    assert devices_wanted(ModelSpec(), TrainingSpec(processes=2)) == 0


WORTH_IT = [
    WorkerFailed(rank=0, code=-9, log="attempt-001.log"),
    Preempted(step=4, folder="run"),
    ControllerSilent(model="flights", command="start", waited_s=10),
]
IN_VAIN = [
    GateFailed(stage="scores", what="'score' differs", found="torch 0.1, graph 0.9"),
    LossNotFinite(step=7, value="nan", folder="run"),
    ValueError("a bug"),
    KeyError("another"),
]


@pytest.mark.parametrize("error", WORTH_IT, ids=lambda error: type(error).__name__)
def test_an_error_marked_as_retryable_is_retried(error: SerinError) -> None:
    assert error_is_retryable(None, None, Failed(data=error))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", IN_VAIN, ids=lambda error: type(error).__name__)
def test_any_other_error_fails_at_once(error: Exception) -> None:
    assert not error_is_retryable(None, None, Failed(data=error))  # type: ignore[arg-type]


@pytest.mark.parametrize(("error", "tries"), [(WORTH_IT[0], 3), (IN_VAIN[0], 1)], ids=["retryable", "final"])
def test_the_engine_asks_the_error_itself(prefect_server: None, error: Exception, tries: int) -> None:
    count = 0

    @task(retries=2, retry_condition_fn=error_is_retryable, cache_policy=NO_CACHE)
    async def fail() -> None:
        nonlocal count
        count += 1
        raise error

    @flow
    async def run() -> Any:
        return await fail()

    with pytest.raises(type(error), match=str(error)[:20]):
        asyncio.run(run())
    assert count == tries


def test_a_cell_cannot_break_its_table() -> None:
    assert table(("a", "b"), [("x|y", "two\nlines"), ("<img src=x>", 1234567)]) == (
        "| a | b |\n| --- | --- |\n| x\\|y | two lines |\n| &lt;img src=x> | 1,234,567 |\n"
    )


def test_numbers_are_shown_with_four_digits_and_no_false_precision() -> None:
    assert table(("n",), [(0.123456789,), (12345.678,)]) == "| n |\n| --- |\n| 0.1235 |\n| 12,346 |\n"


def test_a_receipt_shows_what_was_measured_and_nothing_else() -> None:
    with measure("etl") as measurement:
        measurement.rows, measurement.work_s = 1000, 2.0
        measurement.waits = [Wait(what="imports of torch", seconds=2.2)]
    page = receipt_table(measurement.receipt.to_json())
    assert "| rows/s | 500 |" in page
    assert "| waited | imports of torch 2.2 s |" in page
    assert "waiting" not in page
    assert "None" not in page


def test_a_drawing_travels_inside_its_page_and_none_leaves_nothing() -> None:
    assert drawing("<svg/>", "loss").startswith("![loss](data:image/svg+xml;base64,")
    assert drawing("", "loss") == ""
