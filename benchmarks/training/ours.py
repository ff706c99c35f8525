"""Serin's contender: the training loop as a worker runs it, one epoch. Only its steps are timed, not the evaluation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import Watch
from benchmarks.training.networks import device
from benchmarks.training.table import EMBEDDING, NUMERIC, SIZES, read_table
from serin.formats.shards import SplitArrays
from serin.models.build import build_model
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.training.data.loader import Loader
from serin.training.data.tables import ResidentTable
from serin.training.engine.learner import Learner
from serin.training.engine.loop import Loop
from serin.training.engine.tuning.autotune import choose_threads, products_of
from serin.training.engine.tuning.roofline import Peaks, measure_peaks, weigh
from serin.training.launch.job import ResolvedSettings, TrainingJob
from serin.training.parallel.gradients import loss_of
from serin.training.parallel.ranks import Ranks

_tables: dict[str, ResidentTable] = {}
_peaks: dict[str, Peaks] = {}


def run(request: dict[str, Any]) -> dict[str, Any]:
    return train(request, Ranks(rank=0, size=1, device=device()))


def train(request: dict[str, Any], world: Ranks) -> dict[str, Any]:
    """Trains one epoch; `batch_rows` counts all ranks together, `threads` is per rank."""
    table = _table(request["table"], world.device)
    batch_rows = request["batch_rows"]
    torch.manual_seed(1)
    spec = ModelSpec(kind=request["kind"], hidden=request["hidden"], embedding=EMBEDDING)
    network = build_model(spec, TableShape(numeric=NUMERIC, sizes=SIZES, outputs=1))
    threads = choose_threads(products_of(network)(batch_rows // world.size), cores=request["threads"])
    torch.set_num_threads(threads)
    training = TrainingSpec(
        epochs=request["epochs"], batch_rows=batch_rows, learning_rate=request["rate"], schedule="constant"
    )
    gpu = world.device.type == "cuda"
    job = TrainingJob(
        model=spec, training=training, dataset="", dataset_digest="", processes=world.size, gpu=gpu
    )
    choices = ResolvedSettings(
        batch_rows=batch_rows, steps_per_epoch=table.rows // batch_rows, threads=threads,
        precision=request["precision"], device="cuda" if gpu else "cpu", torch=torch.__version__,
    )  # fmt: skip
    learner = Learner(network, training, choices, loss_of("binary"), world)
    loader = Loader(table, batch_rows=batch_rows, seed=1, rank=world.rank, ranks=world.size)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(
            job=job, choices=choices, task="binary", learner=learner, loader=loader, valid=None,
            folder=Path(folder), stop_asked=lambda: False,
        )  # fmt: skip
        watch = Watch()
        loop.run()
        spent = watch.read()
    return {
        "weights": sum(each.numel() for each in network.parameters()),
        "seconds": loop.work_s,
        "cpu_s": spent["cpu_s"],  # with the preparation of steps, and files at the end
        "loss": loop.position.epochs[-1].loss,
        "step": loop.choices.execution,
        "reason": loop.choices.execution_reason,
        "precision": loop.choices.precision,
        "mfu": _mfu(loop, request, world),
    }


def _mfu(loop: Loop, request: dict[str, Any], world: Ranks) -> float | None:
    """Returns the model FLOPs utilisation as a receipt has it: products of the steps over the device's best rate."""
    spec = ModelSpec(kind=request["kind"], hidden=request["hidden"], embedding=EMBEDDING)
    shape = TableShape(numeric=NUMERIC, sizes=SIZES, outputs=1)
    cost = weigh(build_model(spec, shape), shape, optimizer="adamw")
    if cost is None or world.group or loop.choices.precision == "auto":
        return None
    place = f"{world.device} {loop.choices.precision}"
    if place not in _peaks:
        _peaks[place] = measure_peaks(world.device, loop.choices.precision)
    flops = loop.step * loop.choices.batch_rows * cost.flops_per_row
    return flops / loop.work_s / _peaks[place].flops_per_s


def _table(folder: str, on: torch.device) -> ResidentTable:
    if folder not in _tables:
        num, cat, target = read_table(folder)
        rows = target.astype("int64")
        _tables[folder] = ResidentTable(
            SplitArrays(num=(num,), cat=(cat,), target=(target,), rows=(rows,)), on
        )
    return _tables[folder]
