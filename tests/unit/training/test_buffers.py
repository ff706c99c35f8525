"""Buffers that change while a network learns: what is scored is what is saved, on every rank and after every resume."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.formats.shards import read_split
from serin.formats.weights import read_weights
from serin.models.build import build_model, load_model
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.data.tables import open_table
from serin.training.engine.evaluate import evaluate
from serin.training.engine.learner import recompute_parts
from serin.training.launch.job import TrainingJob
from serin.training.parallel.buffers import merged
from tests.fakes.datasets import SIZES, make_dataset
from tests.unit.training.ranks import run_ranks, train_rank, train_several
from tests.unit.training.runs import ALONE, assert_same_bits, choices, job_of, made, result

# A BatchNorm, and buffers with every property that matters: persistent or not, float or integer, changed in place or
# replaced, used in training too, drawn at random when the module is made.
NET = """
import torch
from torch import nn

class Body(nn.Module):
    def __init__(self, numeric):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(numeric + 4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))
        self.register_buffer("center", torch.zeros(numeric))
        self.register_buffer("spread", torch.ones(numeric), persistent=False)
        self.register_buffer("waves", torch.randn(numeric, 4), persistent=False)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, num, cat):
        if self.training:
            self.center.mul_(0.8).add_(num.detach().mean(0), alpha=0.2)
            self.spread = 0.8 * self.spread + 0.2 * num.detach().std(0)
            self.batches += 1
        num = (num - self.center) / (0.1 + self.spread)
        return self.layers(torch.cat([num, torch.sin(num @ self.waves)], dim=1))

class Net(nn.Module):
    stages = ("body", "head")

    def __init__(self, numeric, sizes, outputs):
        super().__init__()
        self.body = Body(numeric)
        self.head = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, outputs))

    def forward(self, num, cat):
        return self.head(self.body(num, cat))
"""
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, settings of the training
    "alone": (1, {"gradient_checkpointing": True}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp", "gradient_accumulation": 2}),
    "recomputed": (2, {"strategy": "fsdp", "gradient_checkpointing": True}),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    rows = {"train": 600, "valid": 301, "test": 201}
    return make_dataset(tmp_path_factory.mktemp("dataset") / "dataset", rows=rows)


def job(folder: Path, dataset: Dataset, name: str, **more: Any) -> TrainingJob:
    (folder / "net.py").write_text(NET)
    ranks, training = CASES[name]
    wanted = {"epochs": 2, "batch_rows": 100, "learning_rate": 3e-3, "precision": "fp32", **training, **more}
    model = ModelSpec(module=f"{folder / 'net.py'}:Net")
    return job_of(model, TrainingSpec(**wanted), dataset, processes=ranks)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Dataset) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for ranks in (1, 2):
        jobs = {
            name: job(folder, dataset, name).model_dump_json()
            for name, case in CASES.items()
            if case[0] == ranks
        }
        assert run_ranks(ranks, train_several, jobs, folder) == [0] * ranks
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_reported_metrics_are_those_of_the_saved_weights(
    trained: Path, dataset: Dataset, name: str
) -> None:
    network = load_model(trained / name / "result")
    metrics = result(trained / name)["metrics"]
    for split in ("valid", "test"):
        table = open_table(read_split(dataset.path, split), ALONE.device, sizes=SIZES)
        again = evaluate(network, table, "binary", ALONE)
        reported = {found: metrics[f"{split}_{found}"] for found in again}
        assert again == pytest.approx(reported, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_every_batch_counts_once_in_the_saved_buffers(trained: Path, name: str) -> None:
    state = read_weights(trained / name / "result").state
    steps = json.loads((trained / name / "result" / "state.json").read_text())["step"]
    counters = {key: int(value) for key, value in state.items() if key.endswith(("batches", "tracked"))}
    assert len(counters) == 3
    assert set(counters.values()) == {steps * choices(trained / name)["parts"]}


@pytest.mark.parametrize(("stages", "parts"), [('("body", "head")', 2), ('["head"]', 1), ("None", 1)])
def test_the_stages_that_a_network_names_are_recomputed_one_by_one(
    tmp_path: Path, stages: str, parts: int
) -> None:
    (tmp_path / "net.py").write_text(NET.replace('("body", "head")', stages))
    spec = ModelSpec(module=f"{tmp_path / 'net.py'}:Net")
    assert recompute_parts(build_model(spec, TableShape(numeric=3, sizes=(), outputs=1))) == parts


@pytest.mark.parametrize("name", ["ddp", "recomputed"])
def test_killed_in_the_middle_of_an_epoch_it_ends_with_the_same_buffers(
    trained: Path, tmp_path: Path, dataset: Dataset, name: str
) -> None:
    often = job(tmp_path, dataset, name, checkpoint_every_steps=2).model_dump_json()
    folder = made(tmp_path / "run")
    assert run_ranks(2, train_rank, often, folder, None, 5)[-1] == -signal.SIGKILL
    assert run_ranks(2, train_rank, often, folder, None) == [0, 0]
    assert_same_bits(folder, trained / name)


@st.composite
def values_of_ranks(draw: st.DrawFn) -> list[list[float]]:
    """One list for each rank; at every place either any floats, infinities among them, or the same one everywhere."""
    ranks, floats = draw(st.integers(1, 5)), st.floats(width=32, allow_nan=False)
    places = st.one_of(
        floats.map(lambda one: [one] * ranks), st.lists(floats, min_size=ranks, max_size=ranks)
    )
    return [list(row) for row in zip(*draw(st.lists(places, min_size=1, max_size=4)), strict=True)]


@settings(max_examples=100, deadline=None)
@given(values_of_ranks())
def test_floats_become_their_mean_and_what_is_equal_stays_as_it_is(rows: list[list[float]]) -> None:
    found = merged([torch.tensor(row) for row in rows])
    for values, value in zip(zip(*rows, strict=True), found.tolist(), strict=True):
        if len(set(values)) == 1:
            assert value == values[0]
        elif all(map(math.isfinite, values)):
            assert value == pytest.approx(math.fsum(values) / len(values), rel=1e-6, abs=1e-37)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_kind_of_float_has_a_mean(dtype: torch.dtype) -> None:
    found = merged([torch.tensor([1, 5], dtype=dtype), torch.tensor([1, 8], dtype=dtype)])
    assert found.dtype == dtype
    assert torch.equal(found, torch.tensor([1, 6.5], dtype=dtype))


def test_integers_become_the_greatest_and_flags_are_set_when_one_is() -> None:
    assert merged([torch.tensor([3, 9]), torch.tensor([4, 2])]).tolist() == [4, 9]
    assert merged([torch.tensor([True, False]), torch.tensor([False, False])]).tolist() == [True, False]
