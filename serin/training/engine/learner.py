"""Combines what learns on one rank: the parallelized network, its optimizer, the step, and the state to save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from serin.models.build import Ensemble, state_of
from serin.models.foreign.module import OwnNetwork
from serin.spec.training import TrainingSpec
from serin.training.data.loader import stream_seed
from serin.training.engine.optimizer import Optimizer
from serin.training.engine.precision import candidates
from serin.training.engine.step import Step
from serin.training.launch.job import ResolvedSettings
from serin.training.parallel.buffers import Buffers, buffers_kept, fill_buffers
from serin.training.parallel.dtensors import fill, full
from serin.training.parallel.gradients import Loss
from serin.training.parallel.parallelize import Parallelized
from serin.training.parallel.ranks import Ranks
from serin.training.results.checkpoint import Saved


class Learner:
    """A learner, made from a network on the host; afterwards it is on the ranks' devices, whole or in parts."""

    def __init__(
        self, network: nn.Module, training: TrainingSpec, choices: ResolvedSettings, loss: Loss, world: Ranks
    ) -> None:
        self.network, self.world, self.wanted_execution = network, world, training.execution
        if training.gradient_checkpointing:
            recompute_parts(network)
        self.updates = Optimizer(network, training, world, by_row=choices.by_row, strategy=choices.strategy)
        self.spread = Parallelized(network, choices.strategy, world)
        self.updates.begin(network)
        self.state = RunState(self.spread, self.updates, seed=training.seed)
        precision = choices.precision
        if precision == "auto":  # until it is measured: as most runs will use it in the end
            precision = "tf32" if "tf32" in candidates(world.device) else "fp32"
        self.step = Step(
            self.spread, self.updates, loss, precision=precision, world=world, parts=choices.parts
        )

    @property
    def may_capture(self) -> bool:
        return self.wanted_execution in ("auto", "cuda_graph") and not self.why_not_captured

    @property
    def why_not_captured(self) -> str:
        """Returns a reason why a step cannot be captured that is known without trying; '' if none."""
        if self.world.device.type != "cuda":
            return "only a GPU can capture a step"
        if self.world.size > 1 and self.spread.strategy != "ddp":
            return f"a step of {self.spread.strategy} communicates with other processes between its layers"
        if self.world.size > 1 and self.world.device_ranks > 1:
            return "processes that share a GPU exchange gradients through the host"
        return ""


def recompute_parts(network: nn.Module) -> int:
    """Wraps the parts of a network; returns their number. Less memory for about a third more time, the same gradients.

    Parts are a transformer's blocks, the dense and cross layers of the other networks, or the stages that a user's
    network names; a user's network without stages is one part.
    """
    parts = _parts(network)
    for part in parts:
        again = partial(checkpoint, part.forward, use_reentrant=False)
        if any(True for _ in part.buffers()):
            again = partial(again, context_fn=partial(_buffers_as_before, part))
        part.forward = again
    return len(parts)


def _buffers_as_before(part: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns contexts for a forward pass and its recomputation, which must start from the same buffers and not change
    them.

    Otherwise BatchNorm would count every batch twice.
    """
    before = {name: buffer.detach().clone() for name, buffer in part.named_buffers()}

    @contextmanager
    def repeated() -> Iterator[None]:
        with buffers_kept(part):
            fill_buffers(part, before)
            yield

    return nullcontext(), repeated()


def _parts(network: nn.Module) -> list[nn.Module]:
    if isinstance(network, Ensemble):
        return [part for member in network.members for part in _parts(member)]
    if isinstance(network, OwnNetwork):
        return network.stages()
    blocks = getattr(network, "blocks", None)
    if blocks is not None:
        return list(blocks)
    return [getattr(network, "layers"), *getattr(network, "crosses", ())]  # noqa: B009


class RunState:
    def __init__(self, spread: Parallelized, updates: Optimizer, *, seed: int) -> None:
        self._spread, self._updates, self._seed = spread, updates, seed
        self._network, self._world = spread.network, spread.world
        self._buffers = Buffers(spread.network, spread.rows)

    def begin(self) -> None:
        """Seeds the RNG: ranks that work on the same rows must draw the same dropout."""
        torch.manual_seed(stream_seed(self._seed, "dropout", self._spread.rows.rank))

    def bring_buffers_together(self) -> None:
        """Merges buffers before the network is scored: every rank gets the values that are then saved. All ranks must
        call it."""
        self._buffers.bring_together()

    def weights(self) -> dict[str, Tensor]:
        """Returns all of the network's weights, whole, by name. All ranks must call it."""
        return {name: full(tensor) for name, tensor in state_of(self._network).items()}

    def collect(self) -> dict[str, Tensor]:
        """Returns copies on the host of the first rank, nothing on the others. All ranks must call it."""
        tensors = {f"model.{name}": tensor for name, tensor in self.weights().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self._updates.state().items()}
        tensors |= self._buffers.collect() | self._gather_randomness()
        if not self._world.first:
            return {}
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def restore(self, saved: Saved) -> bool:
        """Restores a saved state. False when the run will not be bit-identical: other hardware, another number of
        ranks."""
        self.load_weights(saved)
        self._buffers.restore(saved.tensors)
        self._updates.load(_under("optimizer", saved.tensors))
        mine = _under(f"random.{self._world.rank}", saved.tensors)
        device = self._world.device
        if saved.position.ranks != self._world.size or ("cuda" in mine) != (device.type == "cuda"):
            rank = self._spread.rows.rank
            torch.manual_seed(stream_seed(self._seed, "dropout", rank, saved.position.step))
            return False
        torch.set_rng_state(mine["cpu"])
        if "cuda" in mine:
            torch.cuda.set_rng_state(mine["cuda"], device)
        return True

    def load_weights(self, saved: Saved) -> None:
        """Loads weights into the existing tensors, which a captured step continues to use."""
        weights = _under("model", saved.tensors)
        persistent = self._network.state_dict().keys()
        for name, tensor in state_of(self._network).items():
            cache = name not in persistent and (name not in weights or weights[name].shape != tensor.shape)
            if not cache:
                fill(tensor, weights[name])

    def _gather_randomness(self) -> dict[str, Tensor]:
        kinds = {"cpu": torch.get_rng_state()}
        if self._world.device.type == "cuda":
            kinds["cuda"] = torch.cuda.get_rng_state(self._world.device)
        return {
            f"random.{rank}.{kind}": state
            for kind, mine in kinds.items()
            for rank, state in enumerate(self._world.gather(mine))
        }


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{prefix}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}.")
    }
