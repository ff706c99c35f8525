"""XGBoost on a real GPU: fed from the shards as cupy arrays, against the same training on the CPU.
Skipped, with the reason, where there is none."""

import importlib.util
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from serin.export.convert.trees2onnx import parse_trees, trees2onnx
from serin.formats.dataset import read_dataset
from serin.formats.shards import read_split
from serin.formats.trained import read_trained
from serin.machine.hardware import inventory
from serin.models.shape import TableShape
from serin.models.trees import margins, read_booster
from serin.scoring.session import open_session
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.data.tree_matrix import features_on, margins_on, quantile_matrix
from serin.training.launch.job import TrainingJob, training_file
from serin.training.launch.launcher import train
from serin.training.programs import grow_trees, trees
from tests.fakes.datasets import SIZES, make_dataset
from tests.unit.training.runs import job_of, result

xgboost: Any = pytest.importorskip("xgboost")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.skipif(not xgboost.build_info()["USE_CUDA"], reason="this XGBoost was built without CUDA"),
]
CUPY = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed")
MODEL = ModelSpec(kind="xgboost", rounds=40, options={"max_depth": 4})
ROWS = {"train": 400_000, "valid": 40_000, "test": 40_000}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("rows") / "dataset", rows=ROWS)


def job_for(
    folder: Path, dataset: Dataset, *, gpu: bool, processes: int = 1, model: ModelSpec = MODEL
) -> TrainingJob:
    job = job_of(model, TrainingSpec(), dataset, processes=processes, gpu=gpu)
    folder.mkdir()
    training_file(folder).write_text(job.model_dump_json())
    return job


@CUPY
def test_features_are_joined_on_the_gpu(dataset: Dataset) -> None:
    import cupy

    part = read_split(dataset.path, "valid").whole()
    found = features_on("cuda")(part.num, part.cat)
    assert isinstance(found, cupy.ndarray)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(cupy.asnumpy(found), features_on("cpu")(part.num, part.cat))


@contextmanager
def few_cores(count: int = 4) -> Iterator[None]:
    """XGBoost takes all cores that it may use; beside other tests, each of its threads would wait for the slowest."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def test_trees_of_the_gpu_are_those_of_the_cpu_with_the_same_bins(dataset: Dataset, tmp_path: Path) -> None:
    """Their bins come from other sketches; with those of the CPU, a GPU makes the same splits."""
    job = job_for(tmp_path / "run", dataset, gpu=False)
    data = read_dataset(job.dataset)
    with few_cores():
        on_cpu = quantile_matrix(job, data, "train")
        own = quantile_matrix(job, data, "train", device="cuda")
        like_cpu = quantile_matrix(job, data, "train", device="cuda", like=on_cpu)
        wanted, found = (
            splits_of(xgboost.train(grow_trees.tree_settings(job, data, device=device), matrix, MODEL.rounds))
            for device, matrix in (("cpu", on_cpu), ("cuda", like_cpu))
        )
    print(
        "equal bins by themselves:", np.array_equal(on_cpu.get_quantile_cut()[1], own.get_quantile_cut()[1])
    )
    same = sum(one == other for one, other in zip(wanted, found, strict=False))
    print(f"{same} of {len(wanted)} nodes are the same")
    assert same >= 0.99 * len(
        wanted
    )  # sums come in another order: two splits of equal gain may change places


def splits_of(booster: Any) -> list[tuple[Any, ...]]:
    table = booster.trees_to_dataframe()
    return list(zip(table["Tree"], table["Node"], table["Feature"], table["Split"].fillna(0.0), strict=True))


def test_trees_of_the_gpu_are_as_good_as_those_of_the_cpu(dataset: Dataset, tmp_path: Path) -> None:
    """Each with its own bins, after enough rounds: before that, other bins make other trees (0.85 to 0.86 AUC after 40
    rounds of 0.1, for another order of the same rows too)."""
    learned = ModelSpec(kind="xgboost", rounds=120, options={"max_depth": 6, "eta": 0.3})
    found, seconds = {}, {}
    for name, gpu in (("warm-up", True), ("cpu", False), ("gpu", True)):
        job = job_for(tmp_path / name, dataset, gpu=gpu, model=learned)
        began = time.perf_counter()
        with few_cores():
            status = trees.train(job, tmp_path / name, lambda: False)
        seconds[name] = time.perf_counter() - began
        assert status.state == "done", status.reason
        found[name] = result(tmp_path / name)["metrics"]
    print(f"XGBoost, {ROWS['train']:,} rows, {learned.rounds} rounds:", seconds, found)
    assert found["gpu"]["test_auc"] == pytest.approx(found["cpu"]["test_auc"], abs=0.003)


def test_the_gpu_gives_the_margins_of_the_cpu_for_the_same_trees(dataset: Dataset, tmp_path: Path) -> None:
    trees.train(job_for(tmp_path / "run", dataset, gpu=True), tmp_path / "run", lambda: False)
    content = read_trained(tmp_path / "run" / "result")[1]
    rows = read_split(dataset.path, "test").whole()
    wanted = margins(read_booster(content), rows.num, rows.cat, SIZES)
    found = margins_on("cuda", read_booster(content), rows.num, rows.cat, list(SIZES))
    print("largest difference of margins", float(np.abs(found - wanted).max()))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_training_under_the_launcher_uses_the_leased_gpu(dataset: Dataset, tmp_path: Path) -> None:
    device = inventory()[0].id
    checkpoint = train(MODEL, TrainingSpec(), dataset, folder=tmp_path / "run", devices=(device,))
    choices = json.loads((tmp_path / "run" / "result" / "state.json").read_text())["choices"]
    assert choices["device"] == "cuda"
    assert checkpoint.metrics["test_auc"] > 0.8


def test_two_workers_on_one_gpu_are_refused_by_xgboost_s_own_reason(dataset: Dataset, tmp_path: Path) -> None:
    """XGBoost adds histograms up by NCCL, which takes one process for each GPU: with two GPUs this trains."""
    if len(inventory()) > 1:
        pytest.skip("there are several GPUs: each worker gets its own")
    job = job_for(tmp_path / "two", dataset, gpu=True, processes=2)
    status = trees.train(job, tmp_path / "two", lambda: False)
    print("two workers on one GPU:", status.state, status.reason)
    assert status.state == "refused"
    assert status.reason.startswith("XGBoost: ")


def test_trees_of_the_gpu_are_exported_and_score_as_they_were_trained(
    dataset: Dataset, tmp_path: Path
) -> None:
    trees.train(job_for(tmp_path / "run", dataset, gpu=True), tmp_path / "run", lambda: False)
    booster = read_booster(read_trained(tmp_path / "run" / "result")[1])
    shape = TableShape(numeric=3, sizes=SIZES, outputs=1)
    session = open_session(trees2onnx(parse_trees(booster), shape, "binary"))
    rows = read_split(dataset.path, "test").whole()
    (found,) = session.run(["logits"], {"num": np.asarray(rows.num), "cat": rows.cat.astype(np.int64)})
    wanted = margins(booster, rows.num, rows.cat, SIZES)
    print("trees of the GPU as ONNX: largest difference", float(np.abs(found - wanted).max()))
    np.testing.assert_allclose(found, wanted, atol=1e-4)
