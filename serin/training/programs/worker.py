"""One rank of a training, from training.json to its last step. Must never import an orchestrator.

`python -m serin.training.programs.worker FOLDER PARENT_PID`, started by torchrun (programs/agent.py), or by the
launcher when it is the only one. How it ended is in status.json.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record

from serin.columns.unscaled import unscaled_warning
from serin.errors import LossNotFinite, Preempted, SerinError
from serin.formats.dataset import DatasetDescription, read_dataset
from serin.formats.schema import Task
from serin.formats.shards import SplitArrays, read_split
from serin.formats.weights import read_weights, write_weights
from serin.machine import environment
from serin.machine.parent_death import die_with_parent
from serin.models.build import build_model
from serin.models.foreign.module import ANY_FAULT
from serin.models.numbers import fit_numbers
from serin.models.shape import TableShape, shape_of
from serin.models.state import load_state
from serin.training.data.class_weights import class_weights
from serin.training.data.loader import Loader, stream_seed
from serin.training.data.stream import StreamLoader
from serin.training.data.tables import MappedTable, ResidentTable, open_table
from serin.training.engine.learner import Learner
from serin.training.engine.loop import Loop
from serin.training.engine.tuning.autotune import final_choices, first_choices, products_of, read_choices
from serin.training.engine.tuning.batch_size import StartAgain
from serin.training.engine.tuning.roofline import WORTH_MEASURING_S, measure_peaks, weigh
from serin.training.launch.job import ResolvedSettings, TrainingJob, gpus_for, only_one, read_job
from serin.training.launch.progress import tell
from serin.training.launch.pruned import start_of
from serin.training.launch.status import Status, write_status
from serin.training.parallel.losses import Loss, loss_of
from serin.training.parallel.ranks import Ranks, open_world
from serin.training.programs.attempt import FORMER_WORKER_ENDS_S
from serin.training.results.checkpoint import Position
from serin.training.results.publish import publish_result

_LOOKED_AT_ROWS = 100_000  # for the size of numbers


class StopFlag:
    """A flag set by SIGTERM; the loop reads it when the ranks synchronise."""

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
    job = read_job(folder)
    wanted, per_gpu = gpus_for(environment.torchrun_place()[-1], job.training), job.training.processes_per_gpu
    if job.gpu and torch.cuda.device_count() < wanted:
        reason = f"{wanted} GPU(s) wanted, torch {torch.__version__} sees {torch.cuda.device_count()}"
        write_status(folder, Status(state="refused", reason=reason))
        sys.exit(1)
    with open_world(gpu=job.gpu, per_gpu=per_gpu) as world, _sole_writer(folder, world):
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
        except StartAgain as error:
            write_status(folder, Status(state="again", reason=str(error)))
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
    """Returns whether an error is the user's and would recur at every attempt; with several ranks it may be a lost
    rank."""
    return (
        job.model.module is not None and job.processes == 1 and not isinstance(error, torch.OutOfMemoryError)
    )


def train(job: TrainingJob, folder: Path, world: Ranks, stop_asked: Callable[[], bool]) -> Status:
    """Runs one attempt to the end. Raises Preempted or LossNotFinite."""
    description = read_dataset(job.dataset)
    shape = shape_of(description)
    split = read_split(job.dataset, "train")
    torch.manual_seed(stream_seed(job.training.seed, "weights"))
    network = build_model(job.model, shape)
    fit_numbers(network, split)
    if world.first and job.model.needs_scaled_numbers:
        _warn_of_unscaled(description, split, folder)
    if description.task == "regression":
        _set_units(network, split)
    if start_of(folder).exists():  # a network that was pruned from a trained one
        load_state(network, read_weights(start_of(folder)).state)
    learner, table, choices = _begin(job, folder, world, description, network, split, shape)
    loop = Loop(
        job=job,
        choices=choices,
        task=description.task,
        targets=description.targets,
        learner=learner,
        loader=_loader(job, choices, table, learner),
        valid=_table(description, job, "valid", world, shape),
        folder=folder,
        stop_asked=stop_asked,
    )
    loop.run()
    _finish(loop, job, description, shape, world, folder)
    return _done(loop, job, shape, world)


def _begin(
    job: TrainingJob,
    folder: Path,
    world: Ranks,
    description: DatasetDescription,
    network: nn.Module,
    split: SplitArrays,
    shape: TableShape,
) -> tuple[Learner, ResidentTable | MappedTable, ResolvedSettings]:
    """Builds learner, loader and settings: as chosen when the run began, or chosen now."""
    kept = read_choices(folder)
    world.wait_for_all()  # nobody writes before all have read
    choices = first_choices(job, folder, world, network, description.rows["train"], kept)
    torch.set_num_threads(choices.threads)
    products = products_of(network)
    loss = _loss(job, description, network, split, world.device)
    learner = Learner(network, job.training, choices, loss, world)
    table = open_table(split, world.device, sizes=shape.sizes)
    if kept is None:
        choices = final_choices(job, folder, choices, learner, table, products)
        learner.step.parts = choices.parts
        torch.set_num_threads(choices.threads)
    return learner, table, choices


def _loader(
    job: TrainingJob, choices: ResolvedSettings, table: ResidentTable | MappedTable, learner: Learner
) -> Loader | StreamLoader:
    rows = learner.spread.rows
    common = {
        "batch_rows": choices.batch_rows, "seed": job.training.seed, "rank": rows.rank, "ranks": rows.size,
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
        return loss_of("regression", scale=network.get_buffer("scale").to(device))
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
    world: Ranks,
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
        found = loop.evaluate(test)
        metrics |= {f"test_{name}": value for name, value in found.items()}
    weights = loop.learner.state.weights()
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


def _done(loop: Loop, job: TrainingJob, shape: TableShape, world: Ranks) -> Status:
    peaks = []
    if world.device.type == "cuda":
        peaks = world.gather(torch.tensor([torch.cuda.max_memory_allocated(world.device)]))
    done = Status(
        state="done",
        step=loop.step,
        rows=(loop.step - loop.first_step) * loop.choices.batch_rows,
        work_s=loop.work_s,
        data_wait_share=loop.data_wait_share,
        peak_bytes=tuple(int(peak) for peak in peaks),
    )
    return done.model_copy(update=_roofline(loop, job, shape, world)) if world.first else done


def _roofline(loop: Loop, job: TrainingJob, shape: TableShape, world: Ranks) -> dict[str, float]:
    """Returns the computed work and the devices' best rates; nothing for a run that is too short to judge."""
    precision, steps = loop.choices.precision, loop.step - loop.first_step
    if loop.work_s < WORTH_MEASURING_S or precision == "auto":
        return {}
    # Computed on a new network, because the trained one may be sharded.
    weight = weigh(build_model(job.model, shape), shape, optimizer=job.training.optimizer)
    if weight is None:
        return {}
    flops, moved = weight.of(steps * loop.choices.batch_rows, steps * world.size, by_row=loop.choices.by_row)
    best, devices = measure_peaks(world.device, precision), world.size / world.device_ranks
    return {
        "flops": flops,
        "moved_bytes": moved,
        "peak_flops_per_s": best.flops_per_s * devices,
        "peak_bytes_per_s": best.bytes_per_s * devices,
    }


def _sole_writer(folder: Path, world: Ranks) -> AbstractContextManager[None]:
    """Waits, on the first rank, until a worker of an earlier attempt that was just killed is really gone."""
    return only_one(folder / "worker.lock", wait_s=FORMER_WORKER_ENDS_S) if world.first else nullcontext()


def _table(
    description: DatasetDescription, job: TrainingJob, split: str, world: Ranks, shape: TableShape
) -> ResidentTable | MappedTable | None:
    if not description.rows.get(split):
        return None
    return open_table(read_split(job.dataset, split), world.device, sizes=shape.sizes)


def _warn_of_unscaled(data: DatasetDescription, split: SplitArrays, folder: Path) -> None:
    """Notes numbers of the first train rows that the network can hardly learn from."""
    rows = np.asarray(split.num[0][:_LOOKED_AT_ROWS])
    text = unscaled_warning({name: rows[:, at] for at, name in enumerate(data.numeric)})
    if text is not None:
        tell(folder, "note", text=text)


def _set_units(network: nn.Module, split: SplitArrays) -> None:
    """Sets the target's unit: the network answers in it and learns in standard units."""
    target = np.concatenate(split.target).astype(np.float64)
    deviation = target.std(axis=0)
    network.get_buffer("shift").copy_(torch.as_tensor(target.mean(axis=0)))
    network.get_buffer("scale").copy_(torch.as_tensor(np.where(deviation > 0, deviation, 1.0)))


def write_result(
    folder: Path,
    *,
    weights: Mapping[str, Tensor],
    job: TrainingJob,
    choices: ResolvedSettings,
    shape: TableShape,
    task: Task,
    position: Position,
    metrics: dict[str, float],
) -> None:
    """Writes `result/{weights.safetensors, model.json, metrics.json, state.json}`, completely or not at all."""
    columns = {"numeric": shape.numeric, "sizes": shape.sizes, "outputs": shape.outputs}
    record = {"model": job.model.model_dump(), "shape": columns, "task": task}
    publish_result(
        folder,
        fill=lambda scratch: write_weights(scratch, weights, record),
        job=job,
        step=position.best_step or 0,
        steps=position.step,
        choices=choices.model_dump(),
        metrics=metrics,
        epochs=[epoch.model_dump() for epoch in position.epochs],
    )


if __name__ == "__main__":
    main()
