"""The training loop of one rank: steps, epochs and checkpoints. It stops on request and resumes exactly where it
stopped.

The host waits for the device only when the ranks synchronise (about twice a second), at the end of an epoch and for a
checkpoint; never in a plain step.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from serin.errors import LossNotFinite, Preempted, TrainingRefused
from serin.formats.schema import Task
from serin.training.data.loader import Loader, StreamLoader
from serin.training.data.tables import Batch, MappedTable, ResidentTable
from serin.training.engine.evaluate import evaluate, goodness
from serin.training.engine.learner import Learner
from serin.training.engine.precision import matrix_products
from serin.training.engine.step import GraphedSteps
from serin.training.engine.tuning.autotune import StartAgain, smaller_parts, write_choices
from serin.training.engine.tuning.step_autotune import TunedStep, ready_step
from serin.training.launch.job import ResolvedSettings, TrainingJob
from serin.training.launch.progress import tell
from serin.training.parallel.ranks import Ranks
from serin.training.results.checkpoint import Checkpoints, EpochRecord, Position, Saved

_TALK_EVERY_S = 0.5
_SAVE_EVERY_S = 60.0  # when checkpoint_every_steps is auto; the end of an epoch is always saved
_LONGEST_WINDOW = 1024  # steps between two synchronisations
_LOSS_UNIT = 2.0**-40
_TELL_EVERY_S = 1.0
_WARM_UP_SHARE = 0.05
_LONGEST_WARM_UP = 1000
_PLATEAU_EPOCHS = 2  # without a better metric before the rate is halved


class Loop:
    def __init__(
        self,
        *,
        job: TrainingJob,
        choices: ResolvedSettings,
        task: Task,
        targets: tuple[str, ...] = (),
        learner: Learner,
        loader: Loader | StreamLoader,
        valid: ResidentTable | MappedTable | None,
        folder: Path,
        stop_asked: Callable[[], bool],
    ) -> None:
        self._training, self.choices, self._task, self._folder = job.training, choices, task, folder
        self._targets = targets
        self._loader, self._valid, self._stop_asked = loader, valid, stop_asked
        self.learner, self._world = learner, learner.world
        self._reporter = Reporter(folder, self._world, epochs=job.training.epochs)
        self.checkpoints = Checkpoints(folder)
        self.steps = choices.steps_per_epoch * job.training.epochs
        self.position = Position(ranks=self._world.size)
        self.first_step = self.step = 0
        self.work_s = 0.0
        self._run: Callable[[Tensor | Batch], Tensor] = learner.step
        # Since the last synchronisation.
        self._losses = torch.zeros(_LONGEST_WINDOW, device=self._world.device)
        self._filled = 0
        self._talk_at = 1
        self._saved_at = self._window_began = time.perf_counter()

    def run(self) -> None:
        """Trains until all epochs are done or training stops early. Raises Preempted when asked to stop, after
        saving."""
        self.learner.state.begin()
        ready = self._ready()
        with matrix_products(ready.precision):
            self._resume()
            self._window_began = time.perf_counter()
            self.step = self.first_step
            if not self._enough():
                self._go(ready)
        self.checkpoints.finish()

    def load_best(self, step: int) -> None:
        """Loads the network's weights from the end of the best epoch."""
        saved = self._from_first(lambda: self.checkpoints.read(step))
        assert saved is not None
        self.learner.state.load_weights(saved)

    def evaluate(self, table: ResidentTable | MappedTable, *, errors: bool = False) -> dict[str, float]:
        """Returns the metrics of a split with the current weights, the same on all ranks."""
        spread = self.learner.spread
        found = evaluate(spread.network, table, self._task, spread.rows, self._targets, errors=errors)
        return self._world.share(found)

    @property
    def data_wait_share(self) -> float:
        return self._loader.wait_s / self.work_s if self.work_s else 0.0

    def _go(self, ready: TunedStep) -> None:
        if ready.stretch is None:
            for rows in ready.feed(self.step, self.steps):
                self._take_step(rows)
                if self._after(self.step):
                    return
            return
        assert isinstance(self._loader, Loader)
        while self.step < self.steps:
            if self._undisturbed() >= ready.stretch.count:
                self._take_steps(ready.stretch)
            else:
                self._take_step(self._loader.rows_of(self.step))
            if self._after(self.step):
                return

    def _undisturbed(self) -> int:
        """Returns the number of steps until something else is due."""
        due = [self._talk_at, (self.step // self.choices.steps_per_epoch + 1) * self.choices.steps_per_epoch]
        every = self._training.checkpoint_every_steps
        if every != "auto":
            due.append((self.step // every + 1) * every)
        return min(due) - self.step

    def _ready(self) -> TunedStep:
        """Returns the step as chosen when the run began, or chooses it now."""
        wanted, ready = self._training.execution, None
        while ready is None:
            decided = self.choices.execution != "auto"
            kind = self.choices.execution if decided else wanted
            try:
                ready = ready_step(self.learner, self._loader, kind, self.choices.precision)
            except torch.OutOfMemoryError as error:  # while steps are timed
                rows = self.choices.batch_rows // self.learner.spread.rows.size
                self._take_smaller_parts(rows, error)
        if decided and ready.kind != self.choices.execution:
            self._reporter.note(
                f"steps run as {ready.kind} now, no longer as {self.choices.execution}: {ready.reason}"
            )
        elif not decided and wanted not in ("auto", ready.kind):
            self._reporter.note(f"steps run as {ready.kind}: {ready.reason}")
        if not decided:
            self._choose(execution=ready.kind, execution_reason=ready.reason)
        if self.choices.precision == "auto":
            self._choose(precision=ready.precision, precision_reason=ready.precision_reason)
        self._run = ready.run
        return ready

    def _choose(self, **changes: object) -> None:
        self.choices = self.choices.model_copy(update=changes)
        if self._world.first:
            write_choices(self._folder, self.choices)

    def _rate_at(self, step: int) -> float:
        return learning_rate_at(
            step,
            steps=self.steps,
            peak=self.choices.learning_rate or self._training.learning_rate,
            schedule=self._training.schedule,
            goodness=self._goodness(),
        )

    def _take_steps(self, stretch: GraphedSteps) -> None:
        losses = stretch.run(self.step, self._rate_at)
        self._losses[self._filled : self._filled + stretch.count].copy_(losses)
        self._filled += stretch.count
        self.step += stretch.count

    def _take_step(self, rows: Tensor | Batch) -> None:
        self.learner.updates.set_rate(self._rate_at(self.step))
        while True:
            try:
                self._losses[self._filled].copy_(self._run(rows))
                self._filled += 1
                self.step += 1
                return
            except torch.OutOfMemoryError as error:
                self._take_smaller_parts(len(rows if isinstance(rows, Tensor) else rows.target), error)

    def _take_smaller_parts(self, count: int, error: BaseException) -> None:
        """Splits the same step, of `count` rows here, into twice as many parts."""
        step = self.learner.step
        parts = smaller_parts(step.parts, count)
        if parts is None:
            reason = (
                f"out of memory with {count // step.parts} rows at a time; training.gradient_checkpointing: true, "
                "a smaller network or more GPUs (training.strategy) need less"
            )
            raise TrainingRefused(folder=self._folder, reason=reason) from error
        still = f"still {self.choices.batch_rows:,} per step"
        text = f"out of memory: {count // parts:,} rows at a time from now on, {still}"
        smaller = {"parts": parts, "execution": "eager", "execution_reason": "out of memory"}
        if self._world.size > 1:
            # Written by the rank that notices it.
            write_choices(self._folder, self.choices.model_copy(update=smaller))
            raise StartAgain(text) from error
        step.parts = parts
        self.learner.updates.clear()
        self._run = step
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()
        self._choose(**smaller)
        self._reporter.note(text)

    def _goodness(self) -> list[float]:
        return [goodness(epoch.metrics) for epoch in self.position.epochs if epoch.metrics]

    def _enough(self) -> bool:
        """Returns whether it has waited long enough for a better epoch."""
        patience = self._training.patience
        return patience is not None and epochs_since_best(self._goodness()) >= patience

    def _after(self, step: int) -> bool:
        """Synchronises, saves or stops where it is due. True when training is complete."""
        every = self._training.checkpoint_every_steps
        epoch_ends = step % self.choices.steps_per_epoch == 0
        save_asked = every != "auto" and step % every == 0
        alone_and_asked = self._world.size == 1 and self._stop_asked()  # other ranks must agree first
        if not (epoch_ends or save_asked or alone_and_asked or step >= self._talk_at):
            return False
        stop, save_due = self._talk(step)
        if epoch_ends:
            self._end_epoch(step)
        elif stop or save_asked or save_due:
            self._save(step)
        enough = epoch_ends and self._enough()
        if enough and step < self.steps:
            self._reporter.note(
                f"stopped after {len(self.position.epochs)} epochs: no better one in the last few"
            )
        if stop and step < self.steps and not enough:
            self.checkpoints.finish()
            raise Preempted(step=step, folder=self._folder)
        self._window_began = time.perf_counter()
        return enough

    def _talk(self, step: int) -> tuple[bool, bool]:
        """Checks the losses since the last synchronisation and agrees with the other ranks: (stop now?, save now?)."""
        # Each rank knows the losses of its own rows.
        losses = self._world.mean(self._losses[: self._filled].tolist())
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
        auto_save = self._training.checkpoint_every_steps == "auto" and now - self._saved_at > _SAVE_EVERY_S
        asked = [self._stop_asked(), auto_save and self._world.first, ahead * self._world.first]
        stop, save_due, ahead = self._world.agree([int(value) for value in asked])
        self._talk_at = step + ahead
        self._reporter.steps(step, self.steps, losses, now - self._window_began, self.choices)
        return bool(stop), bool(save_due)

    def _end_epoch(self, step: int) -> None:
        per_epoch = self.choices.steps_per_epoch
        self.learner.state.bring_buffers_together()
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
        self._reporter.epoch(record, best=best)
        self._save(step)

    def _measure(self, step: int) -> dict[str, float]:
        try:
            return {} if self._valid is None else self.evaluate(self._valid)
        except FloatingPointError as error:
            raise LossNotFinite(step=step, value="nan", folder=self._folder / "checkpoints") from error

    def _save(self, step: int) -> None:
        self.position = self.position.model_copy(update={"step": step, "ranks": self._world.size})
        self._saved_at = time.perf_counter()
        copies = self.learner.state.collect()
        if self._world.first:
            self.checkpoints.save(self.position, copies, lambda: self._reporter.tell("checkpoint", step=step))

    def _resume(self) -> None:
        saved = self._from_first(lambda: self.checkpoints.newest(self._reporter.note))
        self._world.wait_for_all()  # nobody may clean up while another still reads
        if self._world.first:
            self.checkpoints.clear_scratch()
        if saved is not None:
            self.position, self.first_step = saved.position, saved.position.step
            if not self.learner.state.restore(saved):
                self._reporter.note(
                    "resumed on other hardware: the result will not be bit-identical to an uninterrupted run"
                )
        self._talk_at = self.first_step + 1
        self._reporter.started(self.first_step, self._loader.rows, self.choices)

    def _from_first(self, read: Callable[[], Saved | None]) -> Saved | None:
        """What `read` gives on the first rank: other machines may have no such file."""
        if self._world.one_machine:
            return read()
        saved = read() if self._world.first else None
        tensors = self._world.share_tensors(None if saved is None else saved.tensors)
        if tensors is None:
            return None
        position = self._world.share("" if saved is None else saved.position.model_dump_json())
        return Saved(position=Position.model_validate_json(position), tensors=tensors)


class Reporter:
    def __init__(self, folder: Path, world: Ranks, *, epochs: int) -> None:
        self._folder, self._world, self._epochs = folder, world, epochs
        self._told_at = time.perf_counter()

    def note(self, text: str) -> None:
        self.tell("note", text=text)

    def started(self, step: int, rows: int, choices: ResolvedSettings) -> None:
        device = self._world.device
        self.tell(
            "started",
            step=step,
            ranks=self._world.size,
            pid=os.getpid(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
            rows=rows,
            batch_rows=choices.batch_rows,
            precision=choices.precision,
            precision_reason=choices.precision_reason,
            strategy=choices.strategy,
            execution=choices.execution,
            execution_reason=choices.execution_reason,
        )

    def steps(
        self, step: int, of: int, losses: list[float], seconds: float, choices: ResolvedSettings
    ) -> None:
        """Reports the steps since the last synchronisation, at intervals."""
        now = time.perf_counter()
        if now - self._told_at < _TELL_EVERY_S:
            return
        self._told_at = now
        self.tell(
            "step",
            step=step,
            steps=of,
            epoch=(step - 1) // choices.steps_per_epoch + 1,
            epochs=self._epochs,
            loss=sum(losses) / len(losses),
            rows_per_s=len(losses) * choices.batch_rows / max(seconds, 1e-9),
            left_s=round((of - step) * seconds / len(losses), 1),
        )

    def epoch(self, record: EpochRecord, *, best: bool) -> None:
        shown = {"loss": record.loss, **{f"valid_{name}": value for name, value in record.metrics.items()}}
        self.tell(
            "epoch", step=record.step, epoch=record.epoch, epochs=self._epochs, metrics=shown, best=best
        )

    def tell(self, event: str, **facts: object) -> None:
        if self._world.first:
            tell(self._folder, event, **facts)


def learning_rate_at(
    step: int,
    *,
    steps: int,
    peak: float,
    schedule: Literal["cosine", "constant", "plateau"] = "cosine",
    goodness: Sequence[float] = (),
) -> float:
    """Returns the rate of the step with index `step` (from 0) of `steps`.

    `goodness` is that of the epochs before, higher is better. The rate depends on nothing else, so a resumed run
    continues alike.
    """
    warm_up = min(_LONGEST_WARM_UP, int(steps * _WARM_UP_SHARE))
    if step < warm_up:
        return peak * (step + 1) / (warm_up + 1)
    match schedule:
        case "cosine":
            done = (step - warm_up) / max(1, steps - warm_up)
            return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        case "constant":
            return peak
        case "plateau":
            return float(peak * 0.5 ** _plateaus(goodness))


def epochs_since_best(goodness: Sequence[float]) -> int:
    """Returns how many epochs ago the best one ended."""
    best = max(range(len(goodness)), key=lambda epoch: goodness[epoch], default=-1)
    return len(goodness) - 1 - best


def _plateaus(goodness: Sequence[float]) -> int:
    best, waited, found = -math.inf, 0, 0
    for value in goodness:
        waited = 0 if value > best else waited + 1
        best = max(best, value)
        if waited == _PLATEAU_EPOCHS:
            found, waited = found + 1, 0
    return found
