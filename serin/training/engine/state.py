"""Collects the state that a run must save to resume exactly: weights, the optimizer's state, every rank's RNG state."""

from __future__ import annotations

import torch
from torch import Tensor

from serin.models.state import state_of
from serin.training.data.loader import stream_seed
from serin.training.engine.optimizer import Optimizer
from serin.training.parallel.buffers import Buffers
from serin.training.parallel.dtensors import fill, full
from serin.training.parallel.parallelize import Parallelized
from serin.training.results.checkpoint import Saved


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
        return self._spread.unite(self._mine())

    def collect(self) -> dict[str, Tensor]:
        """Returns copies on the host of the first rank, nothing on the others. All ranks must call it."""
        mine = {f"model.{name}": tensor for name, tensor in self._mine().items()}
        mine |= {f"optimizer.{name}": tensor for name, tensor in self._updates.state().items()}
        tensors = self._spread.unite(mine) | self._buffers.collect() | self._gather_randomness()
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
            if not tensor.is_meta and not cache:
                fill(tensor, weights[name])

    def _mine(self) -> dict[str, Tensor]:
        state = state_of(self._network)
        return {name: full(tensor) for name, tensor in state.items() if not tensor.is_meta}

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
