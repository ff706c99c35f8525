"""Pipeline parallelism: consecutive pieces of a network, one per rank, with the 1F1B schedule.

Each rank has the weights of its own piece only; those of the others exist by name and shape ("meta"). Where all ranks
need the whole state (a checkpoint, the result), every rank sends its part to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serin.models.table import assign_stages, stages_of
from serin.training.data.tables import Batch
from serin.training.parallel.buffers import buffers_kept
from serin.training.parallel.gradients import Loss, LossScale
from serin.training.parallel.parallelize import Computing, Parallelized
from serin.training.parallel.ranks import Ranks

_DIMENSIONS = 8


class Pipeline(Parallelized):
    def __init__(self, network: nn.Module, world: Ranks) -> None:
        self.network, self.strategy, self.world, self.rows = network, "pipeline", world, world.apart()
        stages = stages_of(network)
        weights = list(network.named_parameters())
        sizes = [
            sum(weight.numel() for name, weight in weights if name.startswith(stage.owns)) for stage in stages
        ]
        mine = assign_stages(sizes, world.size)[world.rank]
        owned = [name for number in mine for name in stages[number].owns]
        others = [name for stage in stages for name in stage.owns if name not in owned]
        _keep_only(network, tuple(owned), tuple(others), world.device)
        self._piece = _Piece([stages[number].run for number in mine], world)
        self.scorer = _Scorer(network, self._piece, world)
        self._schedules: dict[tuple[int, ...], _Schedule] = {}

    def learn(
        self, pieces: Sequence[Batch], loss: Loss, computing: Computing, scale: LossScale | None
    ) -> Tensor:
        """Returns the loss, which the last rank knows. The other ranks return 0, so that the mean over ranks is
        right."""
        shape = (len(pieces), len(pieces[0].target))
        with computing():
            if shape not in self._schedules:
                self._schedules[shape] = _Schedule(self._piece, self.world, parts=len(pieces))
                self._run_for_nothing(self._schedules[shape], pieces, loss, scale)
            return self._schedules[shape].run(pieces, loss, scale)

    def _run_for_nothing(
        self, schedule: _Schedule, pieces: Sequence[Batch], loss: Loss, scale: LossScale | None
    ) -> None:
        """Runs one step and undoes its effects.

        torch finds the shapes between the ranks by a forward pass over uninitialised memory within the first step. That
        would count in running statistics and draw random numbers, again whenever a run is resumed.
        """
        with buffers_kept(self.network), torch.random.fork_rng(self.world.gpus):
            schedule.run(pieces, loss, scale)
        for weight in self.network.parameters():
            weight.grad = None

    def compiled(self) -> Parallelized:
        raise RuntimeError("a pipeline is not compiled")

    def unite(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        known: dict[str, Tensor] = {}
        for rank in range(self.world.size):
            told = [[(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]]
            dist.broadcast_object_list(told, src=rank, device=torch.device("cpu"))
            for name, shape, dtype in told[0]:
                mine = tensors[name].cpu() if rank == self.world.rank else torch.empty(shape, dtype=dtype)
                dist.broadcast(mine, src=rank)
                known.setdefault(name, mine)
        return known


class _Schedule:
    """torch's 1F1B schedule for one size of a step: it stores the shapes that are sent between ranks."""

    def __init__(self, piece: nn.Module, world: Ranks, *, parts: int) -> None:
        from torch.distributed.pipelining import (  # a second of import that others can save
            PipelineStage,
            Schedule1F1B,
        )

        self._first, self._last = world.rank == 0, world.rank == world.size - 1
        self._world, self._parts = world, parts
        sent_from = torch.device("cpu") if world.through_host else world.device
        stage = PipelineStage(piece, world.rank, world.size, sent_from)
        self._inner = Schedule1F1B(stage, n_microbatches=parts, loss_fn=self._loss, scale_grads=False)
        self._wanted: Callable[[Tensor, Tensor], Tensor] | None = None

    def run(self, pieces: Sequence[Batch], loss: Loss, scale: LossScale | None) -> Tensor:
        factor = 1.0 if scale is None else scale.factor
        self._wanted = lambda answer, target: loss(answer, target) / self._parts * factor
        losses: list[Tensor] = []
        given = []
        if self._first:
            given = [torch.cat([piece.num for piece in pieces]), torch.cat([piece.cat for piece in pieces])]
        if self._last:
            target = torch.cat([piece.target for piece in pieces])
            self._inner.step(*given, target=target, losses=losses)
            return torch.stack([found.detach() for found in losses]).sum() / factor * self._world.size
        self._inner.step(*given)
        return torch.zeros((), device=self._world.device)

    def _loss(self, answer: Tensor, target: Tensor) -> Tensor:
        assert self._wanted is not None
        return self._wanted(answer, target)


class _Piece(nn.Module):
    """This rank's stages. Where ranks exchange tensors through the host, what it receives comes from there, and what it
    sends goes there: gloo cannot send a GPU's memory."""

    def __init__(self, runs: Sequence[Callable[..., Tensor]], world: Ranks) -> None:
        super().__init__()
        self._runs = list(runs)  # they belong to the network; this class only calls them
        self._device = world.device
        self._sends_host = world.through_host and world.rank < world.size - 1

    def forward(self, *given: Tensor) -> Tensor:
        value = self.compute(*(each.to(self._device) for each in given))
        return value.cpu() if self._sends_host else value

    def compute(self, *given: Tensor) -> Tensor:
        first, *others = self._runs
        value = first(*given)
        for run in others:
            value = run(value)
        return value


class _Scorer(nn.Module):
    """The whole network without gradients: every rank in turn, and all of them receive the answer."""

    def __init__(self, network: nn.Module, piece: _Piece, world: Ranks) -> None:
        super().__init__()
        self.network, self._world = network, world
        self._run = piece.compute

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        value, device = num, self._world.device
        for rank in range(self._world.size):
            shape = torch.zeros(_DIMENSIONS, dtype=torch.int64, device=device)
            mine = rank == self._world.rank
            if mine:
                value = self._run(num, cat) if rank == 0 else self._run(value)
                shape[: value.ndim] = torch.tensor(value.shape)
            dist.broadcast(shape, src=rank)
            value = (
                value.contiguous() if mine else torch.empty([n for n in shape.tolist() if n], device=device)
            )
            dist.broadcast(value, src=rank)
        return value


def _keep_only(
    network: nn.Module, owned: tuple[str, ...], others: tuple[str, ...], device: torch.device
) -> None:
    """Keeps this rank's weights and buffers on its device, the others' as names and shapes.

    Buffers of no stage, such as the target's unit, are the same on all ranks.
    """
    for path, module in network.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            mine = f"{path}.{name}".lstrip(".").startswith(owned)
            place = device if mine else torch.device("meta")
            with torch.no_grad() if mine else nullcontext():
                moved = nn.Parameter(weight.detach().to(place), requires_grad=mine and weight.requires_grad)
            module.register_parameter(name, moved)
        for name, buffer in module.named_buffers(recurse=False):
            theirs = f"{path}.{name}".lstrip(".").startswith(others)
            moved = buffer.to("meta" if theirs else device)
            transient = name in module._non_persistent_buffers_set  # noqa: SLF001
            module.register_buffer(name, moved, persistent=not transient)


def unowned_weights(network: nn.Module) -> list[str]:
    """Returns weights that are in none of the stages, which a pipeline could not place."""
    owned = tuple(name for stage in stages_of(network) for name in stage.owns)
    return [name for name, _ in network.named_parameters() if not name.startswith(owned)]
