"""What every stage's work has and needs: a place, a lease, a receipt, a lock, and an end."""

import importlib.machinery
import importlib.util
import logging
import os
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from serin.errors import StageStopped
from serin.etl import build
from serin.etl.engines.device import usable_gpus
from serin.machine.leases import holders
from serin.machine.stopping import check_stopped
from serin.pipeline.etl import build_dataset
from serin.pipeline.needs import Needs, etl_needs, export_needs, train_needs
from serin.pipeline.stage import StageCall, StageResult
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.store.receipt import Receipt
from serin.store.stage_results import receipt_file
from tests.fakes.gpus import pretend_gpus
from tests.fakes.small_pipeline import small_spec
from tests.kit.waiting import until

NO_GPU = Needs(gpus=0, why="a test")
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
    assert [cost.id for cost in done.receipt.device] == ["GPU-a", "GPU-b"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert holders(tmp_path / "home") == ()


def test_an_etl_that_leased_none_sees_none(
    two_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, seen = build_and_look(tmp_path, monkeypatch)
    assert seen == ["", "0 usable"]
    assert (done.ran, done.why) == (True, "no earlier result")
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
    assert [cost.id for cost in measurement.receipt.device] == ["GPU-b"]


def test_work_that_fails_leaves_its_receipt(home: Path) -> None:
    call = StageCall(stage="export", name="parcels")
    with pytest.raises(ZeroDivisionError), call.lock("key"), call.work(NO_GPU, "key"):
        _ = 1 / 0
    receipt = Receipt.load_file(receipt_file(home, "export", "key"))
    assert (receipt.stage, receipt.device[0].id) == ("export", "cpu")


def test_a_receipt_names_the_lock_and_the_lease_that_were_waited_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serin.store.waits.time", SimpleNamespace(perf_counter=count(0, 2).__next__))
    call = StageCall(stage="train", name="parcels")
    with call.lock("key"), call.work(NO_GPU, "key") as measurement:
        pass
    assert [str(wait) for wait in measurement.receipt.waits] == [
        "another run that did the same train 2.0 s", "a free GPU for train 2.0 s",
    ]  # fmt: skip


def test_a_stopped_stage_ends_where_it_looks(home: Path) -> None:
    call = StageCall(stage="etl", name="parcels")
    with pytest.raises(StageStopped), call.lock("key"), call.work(NO_GPU, "key"):
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
        until(lambda: "another run does the same etl" in caplog.text, "its waiting", alive=thread.is_alive)
    thread.join(60)
    assert waited == [True]


GB = 1 << 30


def table_of(folder: Path, size: int) -> DataSpec:
    """A table of that many bytes, none of which is ever read."""
    folder.mkdir(exist_ok=True)
    file = folder / "table.parquet"
    with file.open("wb") as stream:
        stream.truncate(size)
    target = {"expression": "hours > 30", "task": "binary"}
    return DataSpec.model_validate({"tables": {"table": str(file)}, "target": target})


@pytest.mark.parametrize(
    ("engine", "size", "deployment", "gpus"),
    [
        ("auto", 1_000_000, "placed", 0),
        ("auto", 100_000_000, "placed-gpu", 2),
        ("cuda", 1_000_000, "placed-gpu", 1),
        ("dask-cuda", 1_000_000, "placed-gpu", 2),
        ("process", 100_000_000, "placed", 0),
        ("dask", 100_000_000, "placed", 0),
        ("tcp://scheduler:8786", 100_000_000, "placed", 0),
    ],
)
def test_much_data_goes_to_a_gpu_unless_the_spec_says_otherwise(
    two_gpus: None, tmp_path: Path, engine: str, size: int, deployment: str, gpus: int
) -> None:
    found = etl_needs(table_of(tmp_path / "data", size), EtlSpec(engine=engine))
    assert (found.deployment, found.gpus) == (deployment, gpus)
    assert found.shared is bool(gpus)


def test_no_stage_asks_for_more_than_half_of_a_gpu_s_memory(two_gpus: None, tmp_path: Path) -> None:
    found = etl_needs(table_of(tmp_path / "data", 50 * GB), EtlSpec())
    assert found.memory_bytes == GB // 2


def test_without_a_gpu_everything_is_placed_on_a_cpu(tmp_path: Path) -> None:
    assert etl_needs(table_of(tmp_path / "data", 100_000_000), EtlSpec()).deployment == "placed"
    assert exporting(tmp_path, variants=["fp32", "tensorrt"], target="gpu").deployment == "placed"


def exporting(folder: Path, **export: object) -> Needs:
    return export_needs(load_spec(small_spec(folder / "data", rows=100, export=export)))


@pytest.mark.parametrize(
    ("providers", "export", "gpus"),
    [
        ({"cuda"}, {"target": "gpu"}, 1),
        ({"cuda"}, {"target": "auto"}, 1),
        ({"cuda"}, {"target": "cpu"}, 0),
        (set(), {"target": "gpu"}, 0),  # measured on the CPU: ONNX Runtime cannot use the GPU
        ({"tensorrt"}, {"target": "cpu", "variants": ["fp32", "tensorrt"]}, 1),
        (set(), {"target": "cpu", "variants": ["fp32", "tensorrt"]}, 0),
    ],
)
def test_an_export_needs_a_gpu_for_what_is_measured_on_one(
    two_gpus: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    providers: set[str],
    export: dict[str, object],
    gpus: int,
) -> None:
    monkeypatch.setattr("serin.scoring.session.has_device", providers.__contains__)
    found = exporting(tmp_path, **export)
    assert (found.gpus, found.shared) == (gpus, bool(gpus))


def test_a_training_needs_whole_gpus_and_says_why(two_gpus: None) -> None:
    network, training = ModelSpec(), TrainingSpec(processes=2)
    assert str(train_needs(network, training)) == "2 GPUs, alone (model.kind: mlp, training.processes: 2)"
    assert str(train_needs(ModelSpec(kind="xgboost"), TrainingSpec())).startswith("1 GPU, alone")


def test_the_needs_of_a_shared_stage_include_its_memory(two_gpus: None, tmp_path: Path) -> None:
    told = str(etl_needs(table_of(tmp_path / "data", 100_000_000), EtlSpec()))
    assert told == "2 GPUs, shared, 0.5 GB on each (100 MB of data)"
    assert str(etl_needs(table_of(tmp_path / "data", 1_000_000), EtlSpec())) == "no GPU (1 MB of data)"
