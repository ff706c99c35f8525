"""Parallelizes a network over the ranks: alone, replicas (`ddp`), FSDP2 or tensor parallel.

Replicas and FSDP ranks each take their share of a step's rows. With tensor parallel all ranks work on the same rows,
each with its part of every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from serin.models.table import Cut, Divisible
from serin.spec.training import Strategy
from serin.training.data.tables import Batch
from serin.training.parallel.gradients import GradientMean, Loss, LossScale
from serin.training.parallel.ranks import Ranks

Computing = Callable[[], AbstractContextManager[object]]


class Parallelized:
    """A parallelized network. `rows`: the ranks that divide a step's rows."""

    def __init__(self, network: nn.Module, strategy: Strategy, world: Ranks) -> None:
        self.network, self.strategy, self.world = network, strategy, world
        self.rows = world if strategy in ("ddp", "fsdp") else world.apart()
        self._forward: Callable[[Tensor, Tensor], Tensor] = _placed(network, strategy, world)
        self._mean = GradientMean(network, world) if world.group and strategy == "ddp" else None

    def learn(
        self, pieces: Sequence[Batch], loss: Loss, computing: Computing, scale: LossScale | None
    ) -> Tensor:
        """Runs forward and backward over pieces of equal size; leaves the gradients of their mean loss, which it
        returns."""
        total: Tensor | None = None
        sync = getattr(self._forward, "set_requires_gradient_sync", None)  # FSDP's
        for number, piece in enumerate(pieces):
            if sync is not None:  # over the ranks once, not for every piece
                sync(number + 1 == len(pieces))
            with computing():
                found = loss(self._forward(piece.num, piece.cat), piece.target)
                found = found / len(pieces) if len(pieces) > 1 else found
            torch.autograd.backward(found if scale is None else found * scale.factor)
            total = found.detach() if total is None else total + found.detach()
        if self._mean is not None:
            self._mean()
        assert total is not None
        return total

    def compiled(self) -> Parallelized:
        """Returns the same with its forward and backward compiled at the first call."""
        made = copy(self)
        made._forward = torch.compile(self._forward)  # noqa: SLF001
        return made


def _placed(network: nn.Module, strategy: Strategy, world: Ranks) -> nn.Module:
    """Returns the network as a step calls it, on its devices. Sharded weights are never whole on one of them."""
    if not world.group:
        return network.to(world.device)
    match strategy:
        case "fsdp":
            return _sharded(network, world)
        case "tensor":
            return _cut(network, world)
        case _:
            return _replicated(network.to(world.device), world)


def _replicated(network: nn.Module, world: Ranks) -> nn.Module:
    """All ranks begin with the first one's values."""
    if world.size > 1:
        for tensor in (*network.parameters(), *network.buffers()):
            first = tensor.detach().contiguous()
            dist.broadcast(first, src=0)
            tensor.detach().copy_(first)
    return network


def _sharded(network: nn.Module, world: Ranks) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh  # an import that most runs do not need
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for one in getattr(network, "members", (network,)):
        for part in (*getattr(one, "blocks", ()), getattr(one, "categories", None)):
            if isinstance(part, nn.Module):
                fully_shard(part, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network.to(world.device)


def _cut(network: nn.Module, world: Ranks) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    joins = world.through_host  # DTensor's own gathering crashes with gloo on a GPU (dtensors.py)

    def style(cut: Cut) -> ParallelStyle:
        match cut:
            case "table":
                return RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            case "outputs":
                return ColwiseParallel()
            case "outputs_gathered":
                return ColwiseParallel() if joins else ColwiseParallel(output_layouts=Replicate())
            case "inputs":
                return RowwiseParallel()

    assert isinstance(network, Divisible)
    cuts = network.cuts(world.size)
    plan = {name: style(cut) for name, cut in cuts.items()}
    parallelize_module(network, init_device_mesh(world.device.type, (world.size,)), plan)
    for name in (name for name, cut in cuts.items() if joins and cut == "outputs_gathered"):
        network.get_submodule(name).register_forward_hook(
            lambda _module, _given, columns: _JoinColumns.apply(columns, world)  # type: ignore[no-untyped-call]
        )
    return network.to(world.device)  # the parts that are not sharded; the rest is already there


class _JoinColumns(torch.autograd.Function):
    """Joins the columns of all ranks, of equal width. Each rank's gradient is that of its columns, because all
    ranks continue with the same whole."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, world: Ranks) -> Tensor:
        ctx.place = (world.rank * mine.shape[-1], mine.shape[-1])
        pieces = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(pieces, mine.contiguous())
        return torch.cat(pieces, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (whole,) = gradients
        return whole.narrow(-1, *ctx.place).contiguous(), None
