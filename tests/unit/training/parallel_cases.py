"""Trainings by one rank and by two, however the network is shared out: on the CPU, or on one GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.launch.job import TrainingJob
from tests.unit.training.ranks import run_ranks, train_rank, train_several
from tests.unit.training.runs import job_of, result

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
    "tensor-transformer": Case(model=TRANSFORMER, both={"clip_norm": 0.5}, two={"strategy": "tensor"}),
    "fsdp-own": Case(model={"module": "Net"}, two={"strategy": "fsdp", "gradient_checkpointing": True}),
}


def job(
    folder: Path, dataset: Dataset, ranks: int, model: dict[str, Any], *, gpu: bool = False, **settings: Any
) -> TrainingJob:
    """`gpu`: all ranks on one GPU."""
    ours = {"hidden": (32,), "embedding": 8}
    if "module" in model:
        (folder / "net.py").write_text(STAGED)
        ours, model = {}, {"module": f"{folder / 'net.py'}:{model['module']}"}
    elif model.get("kind") == "ft_transformer":
        ours |= {"blocks": 2, "heads": 2}
    training = TrainingSpec(
        **{"epochs": 2, "batch_rows": 100, "learning_rate": 3e-3, "precision": "fp32", **settings},
        processes_per_gpu=ranks if gpu else 1,
    )
    return job_of(ModelSpec(**ours, **model), training, dataset, processes=ranks, gpu=gpu)


def train(made: TrainingJob, folder: Path, *, stop_at: int | None = None) -> list[int]:
    folder.mkdir(exist_ok=True)
    return run_ranks(made.processes, train_rank, made.model_dump_json(), folder, stop_at)


def losses(folder: Path) -> list[float]:
    return [epoch["loss"] for epoch in result(folder)["epochs"]]


def difference(one: Path, other: Path) -> float:
    return max(abs(a - b) for a, b in zip(losses(one), losses(other), strict=True))


def train_all(
    folder: Path, dataset: Dataset, cases: Mapping[str, Case], *, gpu: bool = False, **settings: Any
) -> None:
    """Every case by one process and by two, in as few processes as possible: it is their start that costs. The folders
    are NAME-1 and NAME-2."""
    for ranks in (1, 2):
        jobs = {}
        for name, case in cases.items():
            wanted = {**settings, **case.both, **({} if ranks == 1 else case.two)}
            made = job(folder, dataset, ranks, case.model, gpu=gpu, **wanted)
            jobs[f"{name}-{ranks}"] = made.model_dump_json()
        assert run_ranks(ranks, train_several, jobs, folder) == [0] * ranks
