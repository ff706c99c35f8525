"""One rank of a training, from training.json to its last step. Must never import an orchestrator.

`python -m serin.training.programs.worker FOLDER PARENT_PID`, started by torchrun (programs/agent.py), or by the
launcher when it is the only one. How it ended is in status.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from serin.columns.unscaled import unscaled_warning
from serin.errors import LossNotFinite, Preempted, SerinError
from serin.formats.dataset import DatasetDescription, read_dataset
from serin.formats.shards import SplitArrays, read_split
from serin.formats.weights import read_weights, write_weights
from serin.machine import environment
from serin.machine.parent_death import die_with_parent
from serin.models.build import build_model, load_state, undrawn_model
from serin.models.foreign.module import ANY_FAULT
from serin.models.numbers import fit_numbers
from serin.models.shape import record_of, shape_of
from serin.training.data.class_weights import class_weights
from serin.training.data.loader import Loader, StreamLoader, stream_seed
from serin.training.data.tables import MappedTable, ResidentTable, open_table
from serin.training.engine.learner import Learner
from serin.training.engine.loop import Loop
from serin.training.engine.tuning.autotune import (
    StartAgain,
    final_choices,
    first_choices,
    products_of,
    read_choices,
)
from serin.training.engine.tuning.roofline import WORTH_MEASURING_S, measure_peaks, weigh
from serin.training.launch.job import (
    ResolvedSettings,
    Status,
    TrainingJob,
    gpus_for,
    only_one,
    read_job,
    start_of,
    write_status,
)
from serin.training.launch.progress import tell
from serin.training.parallel.gradients import Loss, loss_of
from serin.training.parallel.ranks import Ranks, open_world
from serin.training.programs.attempt import FORMER_WORKER_ENDS_S, set_by_sigterm
from serin.training.results.publish import publish_result

_LOOKED_AT_ROWS = 100_000  # for the size of numbers


@record
def main() -> None:
    folder = Path(sys.argv[1])
    die_with_parent(int(sys.argv[2]))
    tell(folder, "imported")
    stop, job = set_by_sigterm(), read_job(folder)
    wanted, per_gpu = gpus_for(environment.torchrun_place()[-1], job.training), job.training.processes_per_gpu
    if job.gpu and torch.cuda.device_count() < wanted:
        reason = f"{wanted} GPU(s) wanted, torch {torch.__version__} sees {torch.cuda.device_count()}"
        write_status(folder, Status(state="refused", reason=reason))
        sys.exit(1)
    with (
        open_world(gpu=job.gpu, per_gpu=per_gpu) as world,
        # A worker of an earlier attempt that was just killed must really be gone.
        only_one(folder / "worker.lock", wait_s=FORMER_WORKER_ENDS_S) if world.first else nullcontext(),
    ):
        try:
            status = train(job, folder, world, stop.is_set)
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
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is saved. To free a GPU's memory piece by piece first would take most of a second.
    os._exit(0 if status.state == "done" else Preempted.exit_code)


def _is_the_users(error: BaseException, job: TrainingJob) -> bool:
    """Returns whether an error is the user's and would recur at every attempt; with several ranks it may be a lost
    rank."""
    return (
        job.model.module is not None and job.processes == 1 and not isinstance(error, torch.OutOfMemoryError)
    )


def train(job: TrainingJob, folder: Path, world: Ranks, stop_asked: Callable[[], bool]) -> Status:
    """Runs one attempt to the end. Raises Preempted or LossNotFinite."""
    return _Attempt(job, folder, world, stop_asked).train()


class _Attempt:
    def __init__(self, job: TrainingJob, folder: Path, world: Ranks, stop_asked: Callable[[], bool]) -> None:
        self._job, self._folder, self._world, self._stop_asked = job, folder, world, stop_asked
        self._data, self._split = read_dataset(job.dataset), read_split(job.dataset, "train")
        self._shape = shape_of(self._data)

    def train(self) -> Status:
        job, data = self._job, self._data
        torch.manual_seed(stream_seed(job.training.seed, "weights"))
        network = build_model(job.model, self._shape)
        fit_numbers(network, self._split)
        if self._world.first and job.model.needs_scaled_numbers:
            _warn_of_unscaled(data, self._split, self._folder)
        if data.task == "regression":
            _set_units(network, self._split)
        if start_of(self._folder).exists():  # a network that was pruned from a trained one
            load_state(network, read_weights(start_of(self._folder)).state)
        learner, table, choices = self._begin(network)
        loop = Loop(
            job=job,
            choices=choices,
            task=data.task,
            targets=data.targets,
            learner=learner,
            loader=self._loader(choices, table, learner),
            valid=self._table("valid"),
            folder=self._folder,
            stop_asked=self._stop_asked,
        )
        loop.run()
        self._finish(loop)
        return self._done(loop)

    def _begin(self, network: nn.Module) -> tuple[Learner, ResidentTable | MappedTable, ResolvedSettings]:
        """Builds learner, table and settings: as chosen when the run began, or chosen now."""
        job, folder, world = self._job, self._folder, self._world
        kept = read_choices(folder)
        world.wait_for_all()  # nobody writes before all have read
        choices = first_choices(job, folder, world, network, self._data.rows["train"], kept)
        torch.set_num_threads(choices.threads)
        products = products_of(network)
        learner = Learner(network, job.training, choices, self._loss(network), world)
        table = open_table(self._split, world.device, sizes=self._shape.sizes)
        if kept is None:
            choices = final_choices(job, folder, choices, learner, table, products)
            torch.set_num_threads(choices.threads)
        return learner, table, choices

    def _loader(
        self, choices: ResolvedSettings, table: ResidentTable | MappedTable, learner: Learner
    ) -> Loader | StreamLoader:
        rows = learner.spread.rows
        common = {
            "batch_rows": choices.batch_rows, "seed": self._job.training.seed, "rank": rows.rank, "ranks": rows.size,
        }  # fmt: skip
        return Loader(table, **common) if isinstance(table, ResidentTable) else StreamLoader(table, **common)

    def _loss(self, network: nn.Module) -> Loss:
        device, task = self._world.device, self._data.task
        if task == "regression":
            return loss_of("regression", scale=network.get_buffer("scale").to(device))
        classes = 2 if task == "binary" else len(self._data.classes or ())
        weights = class_weights(self._job.training.class_weights, self._split.target, classes)
        return loss_of(task, weights=None if weights is None else torch.tensor(weights, device=device))

    def _table(self, split: str) -> ResidentTable | MappedTable | None:
        if not self._data.rows.get(split):
            return None
        return open_table(read_split(self._job.dataset, split), self._world.device, sizes=self._shape.sizes)

    def _finish(self, loop: Loop) -> None:
        """Takes the best epoch's weights, measures them on the test rows, and writes `result/{weights.safetensors,
        model.json, metrics.json, state.json}`, completely or not at all."""
        job, position = self._job, loop.position
        (best,) = self._world.agree([position.best_step or 0 if self._world.first else 0])
        loop.load_best(best)
        metrics = {
            f"valid_{name}": value
            for epoch in position.epochs
            if epoch.step == best
            for name, value in epoch.metrics.items()
        }
        test = self._table("test") if job.test else None
        if test is not None:
            found = loop.evaluate(test, errors=True)
            metrics |= {f"test_{name}": value for name, value in found.items()}
        weights = loop.learner.state.weights()
        if self._world.first:
            publish_result(
                self._folder,
                fill=lambda scratch: write_weights(scratch, weights, record_of(job.model, self._data)),
                job=job,
                step=position.best_step or 0,
                steps=position.step,
                choices=loop.choices.model_dump(),
                metrics=metrics,
                epochs=[epoch.model_dump() for epoch in position.epochs],
            )

    def _done(self, loop: Loop) -> Status:
        world, peaks = self._world, []
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
        return done.model_copy(update=self._roofline(loop)) if world.first else done

    def _roofline(self, loop: Loop) -> dict[str, float]:
        """Returns the computed work and the devices' best rates; nothing for a run that is too short to judge."""
        world, choices, steps = self._world, loop.choices, loop.step - loop.first_step
        if loop.work_s < WORTH_MEASURING_S or choices.precision == "auto":
            return {}
        # Computed on a new network, because the trained one may be sharded.
        fresh, optimizer = undrawn_model(self._job.model, self._shape), self._job.training.optimizer
        cost = weigh(fresh, self._shape, optimizer=optimizer)
        if cost is None:
            return {}
        flops, moved = cost.of(steps * choices.batch_rows, steps * world.size, by_row=choices.by_row)
        best, devices = measure_peaks(world.device, choices.precision), world.size / world.device_ranks
        return {
            "flops": flops,
            "moved_bytes": moved,
            "peak_flops_per_s": best.flops_per_s * devices,
            "peak_bytes_per_s": best.bytes_per_s * devices,
        }


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


if __name__ == "__main__":
    main()
