"""What a stage needs and so where it is placed. The GPUs are pretended; whether cupy is installed is, too."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

from serin.pipeline import needs
from serin.pipeline.needs import Needs, etl_needs, export_needs, train_needs
from serin.spec.data import DataSpec
from serin.spec.etl import EtlSpec
from serin.spec.load import load_spec
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from tests.fakes.gpus import pretend_gpus
from tests.fakes.small_pipeline import small_spec

GB = 1 << 30


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(tmp_path, monkeypatch, ["GPU-a", "GPU-b"])
    real = importlib.util.find_spec
    cupy = importlib.machinery.ModuleSpec("cupy", None)
    monkeypatch.setattr(
        needs.importlib.util, "find_spec", lambda name: cupy if name == "cupy" else real(name)
    )


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
    monkeypatch.setattr("serin.export.session.has_device", providers.__contains__)
    found = exporting(tmp_path, **export)
    assert (found.gpus, found.shared) == (gpus, bool(gpus))


def test_a_training_needs_whole_gpus_and_says_why(two_gpus: None) -> None:
    network, training = ModelSpec(), TrainingSpec(processes=2)
    assert str(train_needs(network, training)) == "2 GPUs, alone (model.kind: mlp, training.processes: 2)"
    assert str(train_needs(ModelSpec(kind="xgboost"), TrainingSpec())).startswith("1 GPU, alone")


def test_the_needs_of_a_shared_stage_include_its_memory(two_gpus: None, tmp_path: Path) -> None:
    told = str(etl_needs(table_of(tmp_path / "data", 100_000_000), EtlSpec()))
    assert told == "2 GPUs, shared, 0.2 GB on each (100 MB of data)"
    assert str(etl_needs(table_of(tmp_path / "data", 1_000_000), EtlSpec())) == "no GPU (1 MB of data)"
