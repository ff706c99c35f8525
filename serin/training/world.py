"""The ranks of a training: who I am, on what device, and the little they tell each other beside gradients.

What they agree on travels over gloo, between hosts' memories, so that it never makes a GPU wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from serin import environment


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Is this the rank that writes?"""
        return self.rank == 0

    def agree(self, values: Sequence[int]) -> list[int]:
        """The greatest of each value over all ranks, the same on all of them."""
        if self.size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return [int(value) for value in shared.tolist()]

    def mean(self, values: Sequence[float]) -> list[float]:
        """Of each value over all ranks, the same on all of them."""
        if self.size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared)
        return [float(value) for value in (shared / self.size).tolist()]

    def gather(self, piece: Tensor) -> list[Tensor]:
        """The pieces of all ranks, equal in shape and type, on the host of the first; nothing on the others."""
        mine = piece.cpu().contiguous()
        if self.size == 1:
            return [mine]
        pieces = [torch.empty_like(mine) for _ in range(self.size)] if self.first else None
        dist.gather(mine, pieces)
        return pieces or []

    def join(self, piece: Tensor) -> Tensor:
        """The pieces of all ranks, equal in shape and type, one after the other, on every rank."""
        if self.size == 1:
            return piece
        pieces = [torch.empty_like(piece) for _ in range(self.size)]
        dist.all_gather(pieces, piece.contiguous())
        return torch.cat(pieces)

    def share(self, found: dict[str, float]) -> dict[str, float]:
        """What the first rank found, on all of them."""
        if self.size == 1:
            return found
        told = [found]
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
        return told[0]

    def wait_for_all(self) -> None:
        self.agree([0])

    def share_gradients(self, network: nn.Module, strategy: Literal["ddp", "fsdp"]) -> nn.Module:
        """The network as a step calls it: gradients are averaged over the ranks; with FSDP weights, gradients and the
        optimizer's state are cut over them too, layer by layer where a network names its blocks."""
        if self.size == 1:
            return network
        if strategy == "fsdp":
            return _shard(network, self)
        devices = [self.device] if self.device.type == "cuda" else None
        with warnings.catch_warnings():
            # Deprecated in torch 2.13 for a name that 2.11 does not have. Our buffers never change.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            return DistributedDataParallel(
                network, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True
            )


def _shard(network: nn.Module, world: World) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh  # costs a start that most runs need not pay
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in getattr(network, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


@contextmanager
def open_world(*, gpu: bool) -> Iterator[World]:
    """This rank among the others that torchrun started; alone when it started none."""
    rank, local_rank, size = environment.torchrun_place()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    try:
        yield World(rank=rank, size=size, device=device)
    finally:
        if size > 1:
            dist.destroy_process_group()
