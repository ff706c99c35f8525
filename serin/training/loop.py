"""The training loop of one rank: steps, epochs, checkpoints; stops when asked to and goes on exactly where it stopped.

The host waits for the device only when the ranks talk (about twice a second), at the end of an epoch and for a
checkpoint; never in a plain step.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from serin.errors import LossNotFinite, Preempted
from serin.formats.schema import Task
from serin.training.checkpoint import Checkpoints, EpochRecord, Position
from serin.training.evaluate import evaluate, goodness
from serin.training.files import write_whole
from serin.training.job import Choices, TrainingJob, choices_file
from serin.training.loader import Loader
from serin.training.losses import Loss
from serin.training.precision import matrix_products
from serin.training.prepare import Feed, ready_step
from serin.training.progress import tell
from serin.training.schedule import epochs_since_best, learning_rate_at
from serin.training.state import RunState
from serin.training.step import Step
from serin.training.stream import StreamLoader
from serin.training.tables import Batch, MappedTable, ResidentTable
from serin.training.updates import Updates
from serin.training.world import World

_TALK_EVERY_S = 0.5
_TELL_EVERY_S = 1.0
_SAVE_EVERY_S = 60.0  # when checkpoint_every_steps is auto; the end of an epoch is saved always
_LONGEST_WINDOW = 1024  # steps between two talks
_LOSS_UNIT = 2.0**-40


class Loop:
    def __init__(
        self,
        *,
        job: TrainingJob,
        choices: Choices,
        task: Task,
        network: nn.Module,
        loss: Loss,
        loader: Loader | StreamLoader,
        valid: ResidentTable | MappedTable | None,
        world: World,
        folder: Path,
        stop_asked: Callable[[], bool],
    ) -> None:
        self._job, self.choices, self._task, self._world, self._folder = job, choices, task, world, folder
        self._loader, self._valid, self._stop_asked = loader, valid, stop_asked
        self.network = network
        self._updates = Updates(network, job.training, world, by_row=choices.by_row)
        forward = world.share_gradients(network, choices.strategy)
        self._updates.begin(network)
        self._state = RunState(network, self._updates, world, seed=job.training.seed)
        self._step = Step(
            forward,
            self._updates,
            loss,
            precision=choices.precision,
            world=world,
            gather=loader.take if isinstance(loader, Loader) else None,
            parts=choices.parts,
        )
        self.checkpoints = Checkpoints(folder)
        self.steps = choices.steps_per_epoch * job.training.epochs
        self.position = Position(ranks=world.size)
        self.first_step = self.step = 0
        self.work_s = 0.0
        self._run: Callable[[Tensor | Batch], Tensor] = self._step
        self._losses = torch.zeros(_LONGEST_WINDOW, device=world.device)  # of the steps since the last talk
        self._filled = 0
        self._talk_at = 1
        self._told_at = self._saved_at = self._window_began = time.perf_counter()

    def run(self) -> None:
        """Until all epochs are done, or enough of them. Preempted when asked to stop, with everything saved."""
        with matrix_products(self.choices.precision):
            self._state.begin()
            feed = self._ready()
            self._resume()
            self._window_began = time.perf_counter()
            self.step = self.first_step
            if not self._enough():
                for rows in feed(self.step, self.steps):
                    self._take_step(rows)
                    self.step += 1
                    if self._after(self.step):
                        break
        self.checkpoints.finish()

    def load_best(self, step: int) -> None:
        """The network as it was at the end of the best epoch."""
        self._state.load_weights(self.checkpoints.read(step))

    @property
    def data_wait_share(self) -> float:
        return self._loader.wait_s / self.work_s if self.work_s else 0.0

    def _ready(self) -> Feed:
        """The step as it was chosen when the run began; chosen now when it begins."""
        decided = self.choices.step != "auto"
        wanted = self.choices.step if decided else self._job.training.step
        ready = ready_step(self._step, self._loader, wanted, network=self.network, world=self._world)
        if decided and ready.kind != self.choices.step:
            self._note(f"the step is {ready.kind} now, no longer {self.choices.step}: {ready.reason}")
        elif not decided and self._job.training.step not in ("auto", ready.kind):
            self._note(f"the step is {ready.kind}: {ready.reason}")
        if not decided:
            self._choose(step=ready.kind, step_reason=ready.reason)
        self._run = ready.run
        return ready.feed

    def _choose(self, **changes: object) -> None:
        self.choices = self.choices.model_copy(update=changes)
        if self._world.first:
            write_whole(choices_file(self._folder), self.choices.model_dump_json(indent=1) + "\n")

    def _take_step(self, rows: Tensor | Batch) -> None:
        self._updates.set_rate(
            learning_rate_at(
                self.step,
                steps=self.steps,
                peak=self._job.training.learning_rate,
                schedule=self._job.training.schedule,
                goodness=self._goodness(),
            )
        )
        while True:
            try:
                self._losses[self._filled].copy_(self._run(rows))
                self._filled += 1
                return
            except torch.OutOfMemoryError:
                if self._world.size > 1 or not self._halve(rows):
                    raise

    def _halve(self, rows: Tensor | Batch) -> bool:
        """The same step in twice as many parts; False when it cannot be cut further."""
        parts, count = 2 * self._step.parts, len(rows if isinstance(rows, Tensor) else rows.target)
        if count % parts:
            return False
        self._step.parts = parts
        self._updates.clear()
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()
        self._run = self._step
        self._choose(parts=parts, step="eager", step_reason="out of memory")
        self._note(
            f"out of memory: {count // parts:,} rows at a time from now on, still "
            f"{self.choices.batch_rows:,} in a step"
        )
        return True

    def _goodness(self) -> list[float]:
        return [goodness(epoch.metrics) for epoch in self.position.epochs if epoch.metrics]

    def _enough(self) -> bool:
        """Has it waited long enough for a better epoch?"""
        patience = self._job.training.patience
        return patience is not None and epochs_since_best(self._goodness()) >= patience

    def _after(self, step: int) -> bool:
        """Talk, save, stop where it is due. True when there is no need to go on."""
        every = self._job.training.checkpoint_every_steps
        epoch_ends = step % self.choices.steps_per_epoch == 0
        save_asked = every != "auto" and step % every == 0
        alone_and_asked = self._world.size == 1 and self._stop_asked()  # with others it takes a talk to agree
        if not (epoch_ends or save_asked or alone_and_asked or step >= self._talk_at):
            return False
        stop, save_due = self._talk(step)
        if epoch_ends:
            self._end_epoch(step)
        elif stop or save_asked or save_due:
            self._save(step)
        enough = epoch_ends and self._enough()
        if enough and step < self.steps:
            self._note(f"stopped after {len(self.position.epochs)} epochs: no better one in the last few")
        if stop and step < self.steps and not enough:
            self.checkpoints.finish()
            raise Preempted(step=step, folder=self._folder)
        self._window_began = time.perf_counter()
        return enough

    def _talk(self, step: int) -> tuple[bool, bool]:
        """Look at the losses since the last talk, agree with the other ranks: (stop now?, save now?)."""
        losses = self._world.mean(self._losses[: self._filled].tolist())  # each rank knows its own rows'
        now = time.perf_counter()
        self.work_s += now - self._window_began
        for ago, loss in zip(range(len(losses) - 1, -1, -1), losses, strict=True):
            if not math.isfinite(loss):
                raise LossNotFinite(step=step - ago, value=str(loss), folder=self._folder / "checkpoints")
        loss_sum = self.position.loss_sum + sum(int(loss / _LOSS_UNIT) for loss in losses)
        self.position = self.position.model_copy(update={"loss_sum": loss_sum})
        self._filled = 0
        seconds_per_step = (now - self._window_began) / len(losses)
        ahead = min(_LONGEST_WINDOW, max(1, int(_TALK_EVERY_S / max(seconds_per_step, 1e-6))))
        auto_save = (
            self._job.training.checkpoint_every_steps == "auto" and now - self._saved_at > _SAVE_EVERY_S
        )
        asked = [self._stop_asked(), auto_save and self._world.first, ahead * self._world.first]
        stop, save_due, ahead = self._world.agree([int(value) for value in asked])
        self._talk_at = step + ahead
        self._tell_step(step, losses, now)
        return bool(stop), bool(save_due)

    def _tell_step(self, step: int, losses: list[float], now: float) -> None:
        if not self._world.first or now - self._told_at < _TELL_EVERY_S:
            return
        self._told_at = now
        rows = len(losses) * self.choices.batch_rows
        tell(
            self._folder,
            "step",
            step=step,
            steps=self.steps,
            epoch=(step - 1) // self.choices.steps_per_epoch + 1,
            epochs=self._job.training.epochs,
            loss=sum(losses) / len(losses),
            rows_per_s=rows / max(now - self._window_began, 1e-9),
        )

    def _end_epoch(self, step: int) -> None:
        epochs, per_epoch = self._job.training.epochs, self.choices.steps_per_epoch
        found = self._measure(step)
        loss = self.position.loss_sum * _LOSS_UNIT / per_epoch
        record = EpochRecord(epoch=step // per_epoch, step=step, loss=loss, metrics=found)
        before = next((past for past in self.position.epochs if past.step == self.position.best_step), None)
        best = before is None or not found or goodness(found) > goodness(before.metrics)
        self.position = self.position.model_copy(
            update={
                "loss_sum": 0,
                "epochs": (*self.position.epochs, record),
                "best_step": step if best else self.position.best_step,
            }
        )
        if self._world.first:
            shown = {"loss": loss, **{f"valid_{name}": value for name, value in found.items()}}
            tell(
                self._folder, "epoch", step=step, epoch=record.epoch, epochs=epochs, metrics=shown, best=best
            )
        self._save(step)

    def _measure(self, step: int) -> dict[str, float]:
        if self._valid is None:
            return {}
        try:
            return evaluate(self.network, self._valid, self._task, self._world)
        except FloatingPointError as error:
            raise LossNotFinite(step=step, value="nan", folder=self._folder / "checkpoints") from error

    def _save(self, step: int) -> None:
        self.position = self.position.model_copy(update={"step": step, "ranks": self._world.size})
        self._saved_at = time.perf_counter()
        copies = self._state.collect()
        if self._world.first:
            self.checkpoints.save(self.position, copies, lambda: tell(self._folder, "checkpoint", step=step))

    def _resume(self) -> None:
        saved = self.checkpoints.newest(self._note)
        self._world.wait_for_all()  # nobody may tidy up while another still reads
        if self._world.first:
            self.checkpoints.clear_scratch()
        if saved is not None:
            self.position, self.first_step = saved.position, saved.position.step
            if not self._state.restore(saved):
                self._note("resumed on other hardware: the run goes on, but not bit for bit as it would have")
        self._talk_at = self.first_step + 1
        if self._world.first:
            tell(self._folder, "started", step=self.first_step, ranks=self._world.size, **self._setting())

    def _setting(self) -> dict[str, object]:
        device = self._world.device
        return {
            "pid": os.getpid(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
            "rows": self._loader.rows,
            "batch_rows": self.choices.batch_rows,
            "precision": self.choices.precision,
            "step_kind": self.choices.step,
            "step_reason": self.choices.step_reason,
        }

    def _note(self, text: str) -> None:
        if self._world.first:
            tell(self._folder, "note", text=text)
