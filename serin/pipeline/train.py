"""A dataset to trained weights: find them, or train on leased GPUs, from where an earlier call stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from serin.errors import Preempted
from serin.machine import environment
from serin.machine.leases import GivingWay, Lease
from serin.pipeline.experiments import Progress, keep_experiment
from serin.pipeline.follow_files import process_lines, rank_line
from serin.pipeline.needs import train_needs
from serin.pipeline.stage import StageCall, StageResult, checkpoint_here, dataset_here, share_checkpoint
from serin.spec.model import ModelSpec
from serin.spec.names import Priority
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Checkpoint, Dataset
from serin.store.receipt import Receipt
from serin.store.runs import name_model
from serin.store.stage_keys import StageKey, remember
from serin.store.stage_results import find_result, keep_result
from serin.store.version_cost import keep_receipt, read_version_cost
from serin.training.launch import launcher
from serin.training.launch.run_dir import refuse_changed_code, training_folder, training_key, training_parts

if TYPE_CHECKING:
    from serin.training.launch.machines import Machines


def train_model(
    model: ModelSpec,
    training: TrainingSpec,
    dataset: Dataset,
    *,
    name: str,
    machines: Machines | None = None,
    fresh: bool = False,
    attempt: str | None = None,
    run: str | None = None,
    priority: Priority = "normal",
    stop: threading.Event | None = None,
) -> StageResult[Checkpoint]:
    """The trained weights of the sections and the dataset.

    `fresh`: train again although they are known; the same `attempt` then continues what it has begun. `machines`: those
    that train together, each by this call; they take no lock against each other. `run`, `priority` and `stop`: see
    StageCall; a training that is stopped saves first and raises Preempted. An idle one gives way to urgent work: it
    saves, waits in the queue again and continues. Hosts that train together do not.
    """
    call = StageCall.of("train", name, fresh=fresh, attempt=attempt, run=run, priority=priority, stop=stop)
    dataset = dataset_here(dataset)
    parts = training_parts(model, training, dataset)
    folder = training_folder(call.home, model, training, dataset, attempt=call.attempt)
    together = machines is not None and machines.count > 1
    with nullcontext() if together else call.lock(folder.name):
        known = None if fresh else find_checkpoint(model, training, dataset)
        if known is not None:
            return call.found(known, f"trained before: {known.path}")
        why = call.begin(parts, receipt=folder / "receipt.json")
        name_model(folder, name)
        checkpoint = _train(call, model, training, dataset, parts, folder, machines)
        share_checkpoint(checkpoint)
        keep_result(call.home, "train", parts.digest, checkpoint)
        remember(call.home, name, parts)
    return StageResult(
        value=checkpoint, ran=True, why=why, receipt=Receipt.load_file(folder / "receipt.json")
    )


def _train(
    call: StageCall,
    model: ModelSpec,
    training: TrainingSpec,
    dataset: Dataset,
    parts: StageKey,
    folder: Path,
    machines: Machines | None,
) -> Checkpoint:
    """Trains on leased GPUs, as often as it has to give them back to urgent work."""
    alone = machines is None or machines.count == 1
    before: Lease | None = None
    while True:
        with (
            call.lease(train_needs(model, training), gives_way=alone, after=before) as held,
            process_lines(lambda: _logs(folder), label=rank_line),
            _receipt_kept(call, folder),
        ):
            refuse_changed_code(parts, training_parts(model, training, dataset), folder)
            way = GivingWay(call.home, held, call.stop)
            try:
                return launcher.train(
                    model, training, dataset, folder=folder, devices=held.ids, machines=machines,
                    stop=way, waits=call.waits, hear=Progress(folder).hear,
                )  # fmt: skip
            except Preempted as stopped:
                if way.to is None or call.stop.is_set():
                    raise
                before = held
                call.log(f"gives way after step {stopped.fields['step']}, and continues later: {way.to}")


@contextmanager
def _receipt_kept(call: StageCall, folder: Path) -> Iterator[None]:
    """Keeps the receipt and what is shown of the training, also of an attempt that failed or was stopped: it was paid
    for."""
    try:
        yield
    finally:
        paid = Receipt.load_file(folder / "receipt.json")
        keep_receipt(call.home, "train", folder.name, paid, resumed=True)
        costs = read_version_cost(call.home, "", {"training": folder.name}).receipts
        keep_experiment(folder, costs.get("train"))


def _logs(folder: Path) -> Iterator[Path]:
    """The logs of a training's processes on this host."""
    yield from (folder / "logs").glob("attempt-*.log")
    yield from (folder / "hosts" / environment.host() / "logs").glob("attempt-*.log")


def find_checkpoint(model: ModelSpec, training: TrainingSpec, dataset: Dataset) -> Checkpoint | None:
    """Weights that were trained before from the same dataset in the same way, when they are still there."""
    home = environment.home()
    found = find_result(home, "train", training_key(model, training, dataset), Checkpoint)
    return None if found is None else checkpoint_here(found)
