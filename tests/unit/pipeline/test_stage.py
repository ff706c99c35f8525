"""What every stage's work has: a lease that shows no other GPU, a receipt of what was held, a lock, and an end."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from serin.errors import StageStopped
from serin.etl import build
from serin.etl.engines.device import usable_gpus
from serin.machine.leases import holders
from serin.machine.stopping import check_stopped
from serin.pipeline.etl import build_dataset
from serin.pipeline.needs import Needs
from serin.pipeline.stage import StageCall, StageResult
from serin.spec.load import load_spec
from serin.store.artifacts import Dataset
from serin.store.receipt import read_receipt
from serin.store.stage_results import receipt_file
from tests.fakes.gpus import pretend_gpus
from tests.fakes.small_pipeline import small_spec

MADE = Dataset(path="/datasets/1", digest="0123abcd", rows={"train": 8, "valid": 1, "test": 1})


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(tmp_path, monkeypatch, ["GPU-a", "GPU-b"])
    real, cupy = importlib.util.find_spec, importlib.machinery.ModuleSpec("cupy", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: cupy if name == "cupy" else real(name))


def build_and_look(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StageResult[Dataset], list[str]]:
    """A build that only looks at what it was given."""
    seen: list[str] = []

    def look(*_: object, **__: object) -> Dataset:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        seen.append(f"{usable_gpus().count} usable")
        seen.extend(f"{held.kind} {held.device} for {held.purpose}" for held in holders(folder / "home"))
        return MADE

    monkeypatch.setattr(build, "build_dataset", look)
    monkeypatch.setenv("SERIN_HOME", str(folder / "home"))
    spec = load_spec(small_spec(folder / "data", rows=100))
    return build_dataset(spec.data, spec.features, spec.etl, name="parcels"), seen


def test_an_etl_sees_and_pays_for_the_gpus_it_has_leased(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serin.spec.etl.WORTH_BYTES", 1)
    done, seen = build_and_look(tmp_path, monkeypatch)
    held = [f"shared {device} for dataset of parcels" for device in ("GPU-a", "GPU-b")]
    assert seen == ["GPU-a,GPU-b", "2 usable", *held]
    assert done.receipt is not None
    assert [cost.id for cost in done.receipt.device] == ["GPU-a", "GPU-b"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert holders(tmp_path / "home") == ()


def test_an_etl_that_leased_none_sees_none(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, seen = build_and_look(tmp_path, monkeypatch)
    assert seen == ["", "0 usable"]
    assert (done.ran, done.why) == (True, "no earlier result")
    assert done.receipt is not None
    assert [cost.id for cost in done.receipt.device] == ["cpu"]


def test_a_process_leases_the_gpu_that_cuda_was_initialised_with(
    two_gpus: None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serin.pipeline.stage._first_shown", ["GPU-b"])
    call = StageCall(stage="export", name="parcels")
    needs = Needs(gpus=2, shared=True, why="a test")
    with call.lock("key"), call.work(needs, "key") as measurement:
        assert [holder.device for holder in holders(home)] == ["GPU-b"]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert measurement.receipt is not None
    assert [cost.id for cost in measurement.receipt.device] == ["GPU-b"]


def test_work_that_fails_leaves_its_receipt(home: Path) -> None:
    call = StageCall(stage="export", name="parcels")
    with (
        pytest.raises(ZeroDivisionError),
        call.lock("key"),
        call.work(Needs(gpus=0, why="a test"), "key"),
    ):
        _ = 1 / 0
    receipt = read_receipt(receipt_file(home, "export", "key"))
    assert receipt is not None
    assert (receipt.stage, receipt.device[0].id) == ("export", "cpu")


def test_a_stopped_stage_ends_where_it_looks(home: Path) -> None:
    call = StageCall(stage="etl", name="parcels")
    with (
        pytest.raises(StageStopped),
        call.lock("key"),
        call.work(Needs(gpus=0, why="a test"), "key"),
    ):
        check_stopped()
        call.stop.set()
        check_stopped()
    check_stopped()  # its end is not everybody's


def test_a_call_that_had_to_wait_for_another_reports_it(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="serin")
    first, second = (StageCall(stage="etl", name="parcels") for _ in range(2))
    waited: list[bool] = []

    def wait() -> None:
        with second.lock("key") as had_to:
            waited.append(had_to)

    with first.lock("key") as had_to:
        assert not had_to
        thread = threading.Thread(target=wait)
        thread.start()
        deadline = time.monotonic() + 60
        while "another run does the same etl" not in caplog.text:
            assert thread.is_alive(), "it did not wait"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    thread.join(60)
    assert waited == [True]
