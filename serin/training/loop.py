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
from serin.training.checkpoint import Checkpoints, EpochRecord, Position, Saved, flat
from serin.training.evaluate import evaluate, goodness
from serin.training.job import Choices, TrainingJob
from serin.training.loader import Batch, Loader, Table, stream_seed
from serin.training.precision import computing, matrix_products
from serin.training.progress import tell
from serin.training.schedule import learning_rate_at
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
        loader: Loader,
        valid: Table | None,
        world: World,
        folder: Path,
        stop_asked: Callable[[], bool],
    ) -> None:
        self._job, self._choices, self._task, self._world, self._folder = job, choices, task, world, folder
        self._loader, self._valid, self._stop_asked = loader, valid, stop_asked
        self.network = network
        self._stepped = world.share_gradients(network)
        self._optimizer = _optimizer(network, job)
        self._loss_of = _loss(task, network)
        self.checkpoints = Checkpoints(folder)
        self.steps = choices.steps_per_epoch * job.training.epochs
        self.position = Position(ranks=world.size)
        self.first_step = 0
        self.work_s = 0.0
        self._losses = torch.zeros(_LONGEST_WINDOW, device=world.device)  # of the steps since the last talk
        self._filled = 0
        self._talk_at = 1
        self._told_at = self._saved_at = self._window_began = time.perf_counter()

    def run(self) -> None:
        """Until all epochs are done. Preempted when asked to stop, with everything saved."""
        self._resume()
        self._window_began = time.perf_counter()
        step = self.first_step
        with matrix_products(self._choices.precision):
            for batch in self._loader.batches(step, self.steps):
                self._step(batch, step)
                step += 1
                self._after(step)
        self.checkpoints.finish()

    def load_best(self, step: int) -> None:
        """The network as it was at the end of the best epoch."""
        self.network.load_state_dict(_under("model", self.checkpoints.read(step).tensors))

    @property
    def data_wait_share(self) -> float:
        return self._loader.wait_s / self.work_s if self.work_s else 0.0

    def _step(self, batch: Batch, step: int) -> None:
        rate = learning_rate_at(step, steps=self.steps, peak=self._job.training.learning_rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        with computing(self._choices.precision, self._world.device):
            loss = self._loss_of(self._stepped(batch.num, batch.cat), batch.target)
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._losses[self._filled].copy_(loss.detach())
        self._filled += 1

    def _after(self, step: int) -> None:
        every = self._job.training.checkpoint_every_steps
        epoch_ends = step % self._choices.steps_per_epoch == 0
        save_asked = every != "auto" and step % every == 0
        alone_and_asked = self._world.size == 1 and self._stop_asked()  # with others it takes a talk to agree
        if not (epoch_ends or save_asked or alone_and_asked or step >= self._talk_at):
            return
        stop, save_due = self._talk(step)
        if epoch_ends:
            self._end_epoch(step)
        elif stop or save_asked or save_due:
            self._save(step)
        if stop and step < self.steps:
            self.checkpoints.finish()
            raise Preempted(step=step, folder=self._folder)
        self._window_began = time.perf_counter()

    def _talk(self, step: int) -> tuple[bool, bool]:
        """Look at the losses since the last talk, agree with the other ranks: (stop now?, save now?)."""
        losses = self._losses[: self._filled].tolist()
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
        rows = len(losses) * self._choices.batch_rows
        tell(
            self._folder,
            "step",
            step=step,
            steps=self.steps,
            epoch=(step - 1) // self._choices.steps_per_epoch + 1,
            epochs=self._job.training.epochs,
            loss=sum(losses) / len(losses),
            rows_per_s=rows / max(now - self._window_began, 1e-9),
        )

    def _end_epoch(self, step: int) -> None:
        epochs, per_epoch = self._job.training.epochs, self._choices.steps_per_epoch
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
        randomness = self._gather_randomness()
        if not self._world.first:
            return
        tensors = {
            **flat("model", self.network.state_dict()),
            **flat("optimizer", self._optimizer.state_dict()["state"]),
            **randomness,
        }
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self.checkpoints.save(self.position, copies, lambda: tell(self._folder, "checkpoint", step=step))

    def _resume(self) -> None:
        saved = self.checkpoints.newest(self._note)
        self._world.wait_for_all()  # nobody may tidy up while another still reads
        if self._world.first:
            self.checkpoints.clear_scratch()
        torch.manual_seed(stream_seed(self._job.training.seed, "dropout", self._world.rank))
        if saved is not None:
            self.position, self.first_step = saved.position, saved.position.step
            self.network.load_state_dict(_under("model", saved.tensors))
            self._load_optimizer(_under("optimizer", saved.tensors))
            self._restore_randomness(saved)
        self._talk_at = self.first_step + 1
        if self._world.first:
            tell(self._folder, "started", step=self.first_step, ranks=self._world.size, **self._setting())

    def _setting(self) -> dict[str, object]:
        device = self._world.device
        return {
            "pid": os.getpid(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
            "rows": self._loader.rows,
            "batch_rows": self._choices.batch_rows,
            "precision": self._choices.precision,
        }

    def _load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            number, _, what = name.partition(".")
            state.setdefault(int(number), {})[what] = tensor
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _gather_randomness(self) -> dict[str, Tensor]:
        kinds = {"cpu": torch.get_rng_state()}
        if self._world.device.type == "cuda":
            kinds["cuda"] = torch.cuda.get_rng_state(self._world.device)
        return {
            f"random.{rank}.{kind}": state
            for kind, mine in kinds.items()
            for rank, state in enumerate(self._world.gather(mine))
        }

    def _restore_randomness(self, saved: Saved) -> None:
        mine = _under(f"random.{self._world.rank}", saved.tensors)
        device = self._world.device
        if saved.position.ranks != self._world.size or ("cuda" in mine) != (device.type == "cuda"):
            seed = (self._job.training.seed, "dropout", self._world.rank, saved.position.step)
            torch.manual_seed(stream_seed(*seed))
            self._note("resumed on other hardware: the run goes on, but not bit for bit as it would have")
            return
        torch.set_rng_state(mine["cpu"])
        if "cuda" in mine:
            torch.cuda.set_rng_state(mine["cuda"], device)

    def _note(self, text: str) -> None:
        if self._world.first:
            tell(self._folder, "note", text=text)


def _optimizer(network: nn.Module, job: TrainingJob) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only, since it means nothing for biases."""
    matrices = [weight for weight in network.parameters() if weight.ndim > 1]
    others = [weight for weight in network.parameters() if weight.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": job.training.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=job.training.learning_rate, fused=True)


def _loss(task: Task, network: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    functional = nn.functional
    match task:
        case "binary":
            return lambda logits, target: functional.binary_cross_entropy_with_logits(
                logits[:, 0].float(), target
            )
        case "multiclass":
            return lambda logits, target: functional.cross_entropy(logits.float(), target.long())
        case "regression":  # in standard units, so that the learning rate does not depend on the target's
            scale = network.get_buffer("scale")
            return lambda values, target: functional.mse_loss(values[:, 0].float() / scale, target / scale)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{prefix}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}.")
    }
