"""A training for the claims: Serin's loop on a table in memory, with its receipt and the metrics of valid rows."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.training.table import EMBEDDING, NUMERIC, SIZES, make_table, read_table
from serin.formats.dataset import read_dataset
from serin.formats.shards import Array, SplitArrays, read_split
from serin.machine.hardware import core_count, inventory
from serin.models.build import build_model
from serin.models.shape import TableShape, shape_of
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.receipt import measure
from serin.training.data.loader import Loader
from serin.training.data.tables import ResidentTable
from serin.training.engine.learner import Learner
from serin.training.engine.loop import Loop
from serin.training.engine.tuning.autotune import choose_threads, products_of
from serin.training.launch.job import ResolvedSettings, TrainingJob
from serin.training.parallel.gradients import loss_of
from serin.training.parallel.ranks import Ranks

SHAPE = TableShape(numeric=NUMERIC, sizes=SIZES, outputs=1)
Place = Literal["cpu", "cuda"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`rows`: of the training split, from its beginning."""

    hidden: tuple[int, ...]
    rows: int
    batch_rows: int
    epochs: int
    place: Place
    rate: float = 0.002
    schedule: Literal["cosine", "constant"] = "cosine"
    precision: Precision = "fp32"
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """`seconds`: of the steps alone. `joules`: of the whole run; None where no driver counts them. `losses`: the
    log loss of the valid rows after each epoch, where it was asked for."""

    seconds: float
    joules: float | None
    auc: float
    logloss: float
    losses: tuple[float, ...]
    state: Mapping[str, Tensor]
    model: ModelSpec
    step: str


class Table:
    """The rows, once on each device that asks for them: those of training first, then the valid ones."""

    def __init__(self, arrays: tuple[Array, Array, Array], train_rows: int, shape: TableShape) -> None:
        self._arrays, self.train_rows, self.shape = arrays, train_rows, shape
        self.rows = len(arrays[2])
        self._made: dict[tuple[str, int, int], ResidentTable] = {}

    @classmethod
    def generated(cls, folder: Path, rows: int) -> Table:
        """The table of the training benchmark; the last eighth is valid."""
        make_table(folder, rows)
        return cls(read_table(str(folder)), rows - rows // 8, SHAPE)

    @classmethod
    def of_dataset(cls, folder: str, *, most_rows: int) -> Table:
        """The last train rows, and the valid rows, of a dataset that the ETL has built."""
        train, valid = (read_split(folder, split).whole() for split in ("train", "valid"))
        pairs = ((train.num, valid.num), (train.cat, valid.cat), (train.target, valid.target))
        num, cat, target = (np.concatenate((one[-most_rows:], other)) for one, other in pairs)
        return cls((num, cat, target), len(target) - len(valid.target), shape_of(read_dataset(folder)))

    def arrays(self, begin: int, end: int) -> tuple[Array, Array, Array]:
        """num, cat and target."""
        num, cat, target = (array[begin:end] for array in self._arrays)
        return num, cat, target

    def part(self, place: Place, begin: int, end: int) -> ResidentTable:
        key = (place, begin, end)
        if key not in self._made:
            num, cat, target = self.arrays(begin, end)
            split = SplitArrays(num=(num,), cat=(cat,), target=(target,), rows=(target.astype("int64"),))
            self._made[key] = ResidentTable(split, torch.device(place))
        return self._made[key]

    def valid(self, place: Place) -> ResidentTable:
        return self.part(place, self.train_rows, self.rows)


def train(
    table: Table, wanted: Settings, *, start: Trained | None = None, each_epoch: bool = False
) -> Trained:
    """Trains as a worker does. `start`: the network to begin with. `each_epoch`: measure valid rows after each."""
    world = Ranks(rank=0, size=1, device=torch.device(wanted.place))
    torch.manual_seed(wanted.seed)
    spec = start.model if start else ModelSpec(kind="mlp", hidden=wanted.hidden, embedding=EMBEDDING)
    network = build_model(spec, table.shape)
    if start:
        network.load_state_dict(dict(start.state))
    threads = choose_threads(products_of(network)(wanted.batch_rows), cores=core_count())
    torch.set_num_threads(threads)
    training = TrainingSpec(
        epochs=wanted.epochs, batch_rows=wanted.batch_rows, learning_rate=wanted.rate,
        schedule=wanted.schedule, precision=wanted.precision, seed=wanted.seed,
    )  # fmt: skip
    gpu, rows = wanted.place == "cuda", table.part(wanted.place, 0, wanted.rows)
    job = TrainingJob(model=spec, training=training, dataset="", dataset_digest="", processes=1, gpu=gpu)
    choices = ResolvedSettings(
        batch_rows=wanted.batch_rows, steps_per_epoch=wanted.rows // wanted.batch_rows, threads=threads,
        precision=wanted.precision, device=wanted.place, torch=torch.__version__,
    )  # fmt: skip
    valid = table.valid(wanted.place)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(
            job=job, choices=choices, task="binary",
            learner=Learner(network, training, choices, loss_of("binary"), world),
            loader=Loader(rows, batch_rows=wanted.batch_rows, seed=wanted.seed, rank=0, ranks=1),
            valid=valid if each_epoch else None, folder=Path(folder), stop_asked=lambda: False,
        )  # fmt: skip
        with measure("train", inventory()[:1] if gpu else ()) as measured:
            loop.run()
            if gpu:
                torch.cuda.synchronize()
        found = loop.evaluate(valid)
    assert measured.receipt is not None
    return Trained(
        seconds=loop.work_s,
        joules=measured.receipt.joules,
        auc=found["auc"],
        logloss=found["logloss"],
        losses=tuple(epoch.metrics["logloss"] for epoch in loop.position.epochs) if each_epoch else (),
        state={name: tensor.detach().cpu().clone() for name, tensor in network.state_dict().items()},
        model=spec,
        step=loop.choices.execution,
    )
