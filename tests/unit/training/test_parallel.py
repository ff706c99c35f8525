"""Two ranks on gloo: they learn what one process learns, however the network is shared out, stop together, and leave
checkpoints that any other number of ranks can take up in any other way."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from serin.errors import Preempted
from serin.formats.weights import read_weights
from serin.models.stages import assign_stages
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.launch.job import TrainingJob
from tests.fakes.datasets import make_dataset
from tests.unit.training.ranks import run_ranks, train_rank, train_several

TOLERANCE = 1e-4  # of an epoch's mean loss: the same sums in another order
STAGED = """
import torch
from torch import nn

class Join(nn.Module):
    def __init__(self, numeric, sizes):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        self.wide = nn.Linear(numeric + 4 * len(sizes), 16)

    def forward(self, num, cat):
        parts = [table(cat[:, number]) for number, table in enumerate(self.tables)]
        return self.wide(torch.cat([num, *parts], dim=1)).relu()

class Net(nn.Module):
    stages = ("join", "body", "head")

    def __init__(self, numeric, sizes, outputs):
        super().__init__()
        self.join, self.body = Join(numeric, sizes), nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, outputs)

    def forward(self, num, cat):
        return self.head(self.body(self.join(num, cat)))

class Hungry(Net):
    def forward(self, num, cat):
        if self.training and len(num) > 25:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(num, cat)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    model: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)  # settings of the training by one and of that by two
    two: dict[str, Any]


TRANSFORMER = {"kind": "ft_transformer"}
CASES = {
    "ddp": Case(both={"clip_norm": 1.0}, two={"strategy": "ddp", "gradient_accumulation": 2}),
    "ddp-sparse": Case(both={"embedding_updates": "sparse"}, two={"strategy": "ddp"}),
    "ddp-fp16": Case(both={"precision": "fp16"}, two={"strategy": "ddp"}),
    "fsdp": Case(both={"clip_norm": 1.0}, two={"strategy": "fsdp", "gradient_accumulation": 2}),
    "fsdp-transformer": Case(model=TRANSFORMER, two={"strategy": "fsdp", "gradient_checkpointing": True}),
    "ddp-ensemble": Case(
        model={"ensemble_size": 2},
        both={"embedding_updates": "sparse"},
        two={"strategy": "ddp", "gradient_accumulation": 2},
    ),
    "fsdp-ensemble": Case(model={"ensemble_size": 2}, two={"strategy": "fsdp"}),
    "tensor-ensemble": Case(model={"ensemble_size": 2}, two={"strategy": "tensor"}),
    "tensor": Case(both={"clip_norm": 0.5}, two={"strategy": "tensor"}),
    "tensor-dcn": Case(model={"kind": "dcn"}, two={"strategy": "tensor", "gradient_accumulation": 2}),
    "tensor-transformer": Case(model=TRANSFORMER, two={"strategy": "tensor"}),
    "pipeline-transformer": Case(model=TRANSFORMER, both={"clip_norm": 0.5}, two={"strategy": "pipeline"}),
    "pipeline-own": Case(
        model={"module": "Net"}, two={"strategy": "pipeline", "gradient_checkpointing": True}
    ),
}


def job(folder: Path, dataset: Dataset, ranks: int, model: dict[str, Any], **settings: Any) -> TrainingJob:
    ours = {"hidden": (32,), "embedding": 8}
    if "module" in model:
        (folder / "net.py").write_text(STAGED)
        ours, model = {}, {"module": f"{folder / 'net.py'}:{model['module']}"}
    elif model.get("kind") == "ft_transformer":
        ours |= {"blocks": 2, "heads": 2}
    return TrainingJob(
        model=ModelSpec(**ours, **model),
        training=TrainingSpec(
            **{"epochs": 2, "batch_rows": 100, "learning_rate": 3e-3, "precision": "fp32", **settings}
        ),
        dataset=dataset.path,
        dataset_digest=dataset.digest,
        processes=ranks,
        gpu=False,
    )


def train(made: TrainingJob, folder: Path, *, stop_at: int | None = None) -> list[int]:
    folder.mkdir(exist_ok=True)
    return run_ranks(made.processes, train_rank, made.model_dump_json(), folder, stop_at)


def losses(folder: Path) -> list[float]:
    epochs = json.loads((folder / "result" / "metrics.json").read_text())["epochs"]
    return [epoch["loss"] for epoch in epochs]


def difference(one: Path, other: Path) -> float:
    return max(abs(a - b) for a, b in zip(losses(one), losses(other), strict=True))


def choices(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "choices.json").read_text())
    return found


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("dataset")
    return make_dataset(folder / "dataset", rows={"train": 600, "valid": 301, "test": 200})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Dataset) -> Path:
    """Every case by one process and by two, in as few processes as possible: it is their start that costs."""
    folder = tmp_path_factory.mktemp("trained")
    for ranks in (1, 2):
        jobs = {}
        for name, case in CASES.items():
            settings = case.both if ranks == 1 else {**case.both, **case.two}
            jobs[f"{name}-{ranks}"] = job(folder, dataset, ranks, case.model, **settings).model_dump_json()
        assert run_ranks(ranks, train_several, jobs, folder) == [0] * ranks
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_loss_curve_of_one(trained: Path, name: str) -> None:
    found = difference(trained / f"{name}-1", trained / f"{name}-2")
    print("largest difference of an epoch's loss", found)
    assert found < (5e-3 if "fp16" in name else TOLERANCE)
    assert choices(trained / f"{name}-2")["strategy"] == CASES[name].two["strategy"]


@pytest.mark.parametrize("name", ["tensor", "pipeline-transformer"])
def test_what_is_cut_is_put_together_in_the_result(trained: Path, name: str) -> None:
    one, two = (read_weights(trained / f"{name}-{ranks}" / "result").state for ranks in (1, 2))
    assert {name: tensor.shape for name, tensor in one.items()} == {
        name: tensor.shape for name, tensor in two.items()
    }
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-2
    metrics = [
        json.loads((trained / f"{name}-{ranks}" / "result" / "metrics.json").read_text())["metrics"]
        for ranks in (1, 2)
    ]
    assert metrics[0] == pytest.approx(metrics[1], abs=2e-3)


def test_ranks_of_fsdp_that_were_stopped_end_with_the_same_weights(tmp_path: Path, dataset: Dataset) -> None:
    """One rank alone is asked; both save and stop at the same step, and go on from there."""
    sharded = job(tmp_path, dataset, 2, {}, strategy="fsdp", checkpoint_every_steps=3)
    assert train(sharded, tmp_path / "run", stop_at=1) == [Preempted.exit_code] * 2
    jobs = {"run": sharded, "whole": job(tmp_path, dataset, 2, {}, strategy="fsdp")}
    done = run_ranks(
        2, train_several, {name: made.model_dump_json() for name, made in jobs.items()}, tmp_path
    )
    assert done == [0, 0]
    ours, theirs = (read_weights(tmp_path / name / "result").state for name in jobs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_resumes_with_other_ranks_and_another_strategy_and_its_batch(
    tmp_path: Path, dataset: Dataset, trained: Path
) -> None:
    """Tensor parallel, stopped; then a pipeline, stopped; then one process to the end."""
    settings = {"clip_norm": 0.5, "checkpoint_every_steps": 3}
    folder = tmp_path / "run"
    for strategy in ("tensor", "pipeline"):
        made = job(tmp_path, dataset, 2, TRANSFORMER, strategy=strategy, **settings)
        assert train(made, folder, stop_at=1) == [Preempted.exit_code] * 2
    assert train(job(tmp_path, dataset, 1, TRANSFORMER, **settings), folder) == [0]
    assert choices(folder)["batch_rows"] == 100
    assert difference(folder, trained / "pipeline-transformer-1") < TOLERANCE
    started = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    resumed = [(record["ranks"], record["strategy"]) for record in started if record["event"] == "started"]
    assert resumed == [(2, "tensor"), (2, "pipeline"), (1, "ddp")]


def test_out_of_memory_of_several_ranks_is_resumed_with_smaller_parts(
    tmp_path: Path, dataset: Dataset
) -> None:
    """What one rank cannot hold ends all; the next start has the same batch in smaller parts."""
    hungry = job(tmp_path, dataset, 2, {"module": "Hungry"}, batch_rows=100, strategy="ddp")
    assert 0 not in train(hungry, tmp_path / "run")
    assert choices(tmp_path / "run")["parts"] == 2
    assert train(hungry, tmp_path / "run") == [0, 0]
    assert choices(tmp_path / "run")["batch_rows"] == 100
    frugal = job(tmp_path, dataset, 1, {"module": "Net"}, batch_rows=100)
    assert train(frugal, tmp_path / "whole") == [0]
    assert difference(tmp_path / "run", tmp_path / "whole") < TOLERANCE


@pytest.mark.parametrize(
    ("sizes", "ranks", "shares"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([10, 1, 1, 1, 1], 2, [1, 4]),
        ([3, 5, 5, 3, 1], 3, [2, 1, 2]),
        ([4], 1, [1]),
    ],
)
def test_stages_are_shared_so_that_the_heaviest_rank_has_least(
    sizes: list[int], ranks: int, shares: list[int]
) -> None:
    assert [len(share) for share in assign_stages(sizes, ranks)] == shares


def test_fewer_stages_than_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 stages do not fill 3 processes"):
        assign_stages([1, 1], 3)
