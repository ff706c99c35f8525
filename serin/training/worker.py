"""One rank of a training, from training.json to its last step. Must never load an orchestrator.

`python -m serin.training.worker FOLDER PARENT_PID`, started by torchrun (serin.training.agent), or by the launcher when
it is the only one. How it ended is in status.json.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from serin.errors import LossNotFinite, Preempted, SerinError, TrainingRefused
from serin.formats.dataset import DatasetDescription, read_dataset
from serin.formats.shards import SplitArrays, read_split
from serin.models.build import build_model
from serin.models.module import ANY_FAULT
from serin.models.shape import TableShape
from serin.training.batch_size import choose_batch_rows, choose_threads
from serin.training.class_weights import class_weights
from serin.training.evaluate import evaluate
from serin.training.files import only_one, write_whole
from serin.training.full import full
from serin.training.job import Choices, TrainingJob, choices_file, training_file
from serin.training.lifeline import die_with_parent
from serin.training.loader import Loader, stream_seed
from serin.training.loop import Loop
from serin.training.losses import Loss, loss_of
from serin.training.precision import choose_precision
from serin.training.result import write_result
from serin.training.status import Status, write_status
from serin.training.stream import StreamLoader
from serin.training.tables import MappedTable, ResidentTable, open_table
from serin.training.updates import by_row_pays, category_tables
from serin.training.world import World, open_world

_FORMER_WORKER_ENDS_S = 60.0


class StopFlag:
    """Set by SIGTERM; the loop looks at it when the ranks talk."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def __call__(self) -> bool:
        return self._asked

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self._asked = True


@record
def main() -> None:
    folder = Path(sys.argv[1])
    die_with_parent(int(sys.argv[2]))
    stop = StopFlag()
    job = TrainingJob.model_validate_json(training_file(folder).read_bytes())
    if job.gpu and torch.cuda.device_count() < job.processes:
        reason = f"{job.processes} GPU(s) wanted, torch {torch.__version__} sees {torch.cuda.device_count()}"
        write_status(folder, Status(state="refused", reason=reason))
        sys.exit(1)
    with open_world(gpu=job.gpu) as world, _sole_writer(folder, world):
        try:
            status = train(job, folder, world, stop)
        except Preempted as stopped:
            status = Status(state="preempted", step=stopped.fields["step"])
        except LossNotFinite as error:
            write_status(
                folder, Status(state="diverged", step=error.fields["step"], loss=error.fields["value"])
            )
            raise
        except SerinError as error:
            write_status(folder, Status(state="refused", reason=str(error)))
            raise
        except ANY_FAULT as error:
            if _is_the_users(error, job):
                reason = f"model.module {job.model.module} raises {type(error).__name__}: {error}"
                write_status(folder, Status(state="refused", reason=reason))
            raise
        if world.first:
            write_status(folder, status)
        world.wait_for_all()
    sys.exit(0 if status.state == "done" else Preempted.exit_code)


def _is_the_users(error: BaseException, job: TrainingJob) -> bool:
    """Would it come again at every attempt? With several ranks it may as well be the loss of another one."""
    return (
        job.model.module is not None and job.processes == 1 and not isinstance(error, torch.OutOfMemoryError)
    )


def train(job: TrainingJob, folder: Path, world: World, stop_asked: Callable[[], bool]) -> Status:
    """One attempt, to the end. Raises Preempted or LossNotFinite."""
    description = read_dataset(job.dataset)
    shape = _shape(description)
    split = read_split(job.dataset, "train")
    torch.manual_seed(stream_seed(job.training.seed, "weights"))
    network = build_model(job.model, shape)
    choices = _choices(job, folder, world, description.rows["train"], network)
    torch.set_num_threads(choices.threads)
    if description.task == "regression":
        _set_units(network, split)
    network.to(world.device)
    loop = Loop(
        job=job,
        choices=choices,
        task=description.task,
        network=network,
        loss=_loss(job, description, network, split, world.device),
        loader=_loader(job, choices, split, shape, world),
        valid=_table(description, job, "valid", world, shape),
        world=world,
        folder=folder,
        stop_asked=stop_asked,
    )
    loop.run()
    _finish(loop, job, description, shape, world, folder)
    return _done(loop, world)


def _loader(
    job: TrainingJob, choices: Choices, split: SplitArrays, shape: TableShape, world: World
) -> Loader | StreamLoader:
    table = open_table(split, world.device, sizes=shape.sizes)
    common = {
        "batch_rows": choices.batch_rows, "seed": job.training.seed, "rank": world.rank, "ranks": world.size,
    }  # fmt: skip
    return Loader(table, **common) if isinstance(table, ResidentTable) else StreamLoader(table, **common)


def _loss(
    job: TrainingJob,
    description: DatasetDescription,
    network: nn.Module,
    split: SplitArrays,
    device: torch.device,
) -> Loss:
    if description.task == "regression":
        return loss_of("regression", scale=network.get_buffer("scale"))
    classes = 2 if description.task == "binary" else len(description.classes or ())
    weights = class_weights(job.training.class_weights, split.target, classes)
    return loss_of(
        description.task, weights=None if weights is None else torch.tensor(weights, device=device)
    )


def _finish(
    loop: Loop,
    job: TrainingJob,
    description: DatasetDescription,
    shape: TableShape,
    world: World,
    folder: Path,
) -> None:
    """Takes the best epoch's weights, measures them on the test rows, writes the result."""
    (best,) = world.agree([loop.position.best_step or 0 if world.first else 0])
    loop.load_best(best)
    metrics = {
        f"valid_{name}": value
        for epoch in loop.position.epochs
        if epoch.step == best
        for name, value in epoch.metrics.items()
    }
    test = _table(description, job, "test", world, shape) if job.test else None
    if test is not None:
        found = evaluate(loop.network, test, description.task, world)
        metrics |= {f"test_{name}": value for name, value in found.items()}
    weights = {name: full(tensor) for name, tensor in loop.network.state_dict().items()}
    if world.first:
        write_result(
            folder,
            weights=weights,
            job=job,
            choices=loop.choices,
            shape=shape,
            task=description.task,
            position=loop.position,
            metrics=metrics,
        )


def _done(loop: Loop, world: World) -> Status:
    peaks = []
    if world.device.type == "cuda":
        peaks = world.gather(torch.tensor([torch.cuda.max_memory_allocated(world.device)]))
    return Status(
        state="done",
        step=loop.step,
        rows=(loop.step - loop.first_step) * loop.choices.batch_rows,
        work_s=loop.work_s,
        data_wait_share=loop.data_wait_share,
        peak_bytes=tuple(int(peak) for peak in peaks),
    )


def _choices(job: TrainingJob, folder: Path, world: World, rows: int, network: nn.Module) -> Choices:
    """What was chosen when the run began; chosen now, by the first rank for all, when it begins."""
    file = choices_file(folder)
    if world.first and not file.exists():
        batch_rows = choose_batch_rows(
            job.training.batch_rows, rows=rows, ranks=world.size, device="cuda" if job.gpu else "cpu"
        )
        if batch_rows == 0:
            raise TrainingRefused(
                folder=folder, reason=f"{rows} training rows do not fill {world.size} process(es)"
            )
        cores = len(os.sched_getaffinity(0)) // world.size
        chosen = Choices(
            batch_rows=batch_rows,
            steps_per_epoch=rows // batch_rows,
            precision=choose_precision(job.training.precision, world.device),
            threads=choose_threads(_products(network, batch_rows // world.size), cores=cores),
            device="cuda" if job.gpu else "cpu",
            torch=torch.__version__,
            strategy="fsdp" if job.training.strategy == "fsdp" else "ddp",
            by_row=_by_row(job, network, batch_rows),
            parts=job.training.accumulate,
        )
        write_whole(file, chosen.model_dump_json(indent=1) + "\n")
    world.wait_for_all()
    choices = Choices.model_validate_json(file.read_bytes())
    if choices.batch_rows % world.size:
        reason = (
            f"the run has {choices.batch_rows} rows per step, which do not divide over {world.size} processes"
        )
        raise TrainingRefused(folder=folder, reason=reason)
    if choices.device != world.device.type:
        precision = choose_precision(job.training.precision, world.device)
        choices = choices.model_copy(update={"precision": precision, "device": world.device.type})
    return choices


def _by_row(job: TrainingJob, network: nn.Module, batch_rows: int) -> bool:
    """Are the category tables large enough to be updated row by row? Not with FSDP, which cuts them up instead."""
    wanted = job.training.embedding_updates
    if wanted != "auto" or job.training.strategy == "fsdp":
        return wanted == "rows" and job.training.strategy != "fsdp"
    return any(
        by_row_pays(len(table.weight), batch_rows * len(table.offsets)) for table in category_tables(network)
    )


def _products(network: nn.Module, rows: int) -> int:
    """Multiplications of a step, roughly: forward and twice that backward."""
    linear = (layer.weight.numel() for layer in network.modules() if isinstance(layer, nn.Linear))
    return 3 * rows * sum(linear)


def _sole_writer(folder: Path, world: World) -> AbstractContextManager[None]:
    """The first rank waits until a worker of an earlier attempt, killed a moment ago, is really gone."""
    return only_one(folder / "worker.lock", wait_s=_FORMER_WORKER_ENDS_S) if world.first else nullcontext()


def _shape(description: DatasetDescription) -> TableShape:
    return TableShape(
        numeric=len(description.numeric),
        sizes=tuple(column.size for column in description.categorical),
        outputs=len(description.classes or ()) if description.task == "multiclass" else 1,
        units=description.task == "regression",
    )


def _table(
    description: DatasetDescription, job: TrainingJob, split: str, world: World, shape: TableShape
) -> ResidentTable | MappedTable | None:
    if not description.rows.get(split):
        return None
    return open_table(read_split(job.dataset, split), world.device, sizes=shape.sizes)


def _set_units(network: nn.Module, split: SplitArrays) -> None:
    """The network answers in the target's unit and learns in standard ones."""
    target = np.concatenate(split.target).astype(np.float64)
    network.get_buffer("shift").fill_(target.mean())
    network.get_buffer("scale").fill_(target.std() or 1.0)


if __name__ == "__main__":
    main()
