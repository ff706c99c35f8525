"""The ranks of a training: the own rank, its device, and small messages between ranks beside gradients.

These messages use gloo on host memory, so that they never make a GPU wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from serin.machine import environment

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    rank: int
    size: int
    device: torch.device
    group: bool = False  # uses torch.distributed; always with several ranks
    local_size: int = 1  # ranks on this machine
    device_ranks: int = 1  # ranks on this rank's GPU

    @property
    def first(self) -> bool:
        """Returns whether this is the rank that writes."""
        return self.rank == 0

    @property
    def gpus(self) -> list[torch.device]:
        """Returns the GPU of this rank; none on a CPU."""
        return [self.device] if self.device.type == "cuda" else []

    @property
    def through_host(self) -> bool:
        """Returns whether ranks exchange tensors through host memory (gloo): on a CPU, and where they share a GPU."""
        return self.device.type == "cpu" or self.device_ranks > 1

    def agree(self, values: Sequence[int]) -> list[int]:
        """Returns the maximum of each value over all ranks, the same on all of them."""
        if self.size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return [int(value) for value in shared.tolist()]

    def mean(self, values: Sequence[float]) -> list[float]:
        """Returns the mean of each value over all ranks, the same on all of them."""
        if self.size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared)
        return [float(value) for value in (shared / self.size).tolist()]

    def gather(self, piece: Tensor) -> list[Tensor]:
        """Returns the pieces of all ranks, equal in shape and type, on the host of the first; nothing on the others."""
        mine = piece.cpu().contiguous()
        if self.size == 1:
            return [mine]
        pieces = [torch.empty_like(mine) for _ in range(self.size)] if self.first else None
        dist.gather(mine, pieces)
        return pieces or []

    def join(self, piece: Tensor) -> Tensor:
        """Concatenates the pieces of all ranks, equal in shape and type, on every rank."""
        if self.size == 1:
            return piece
        pieces = [torch.empty_like(piece) for _ in range(self.size)]
        dist.all_gather(pieces, piece.contiguous())
        return torch.cat(pieces)

    def broadcast(self, piece: Tensor) -> Tensor:
        """Returns the first rank's piece, a host tensor of equal shape and type on all ranks, on every rank."""
        if self.size > 1:
            dist.broadcast(piece, src=0)
        return piece

    def share(self, value: T) -> T:
        """Sends the first rank's value to all of them."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def share_tensors(self, found: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
        """Sends the first rank's host tensors, by name, to all of them; the others' argument does not count."""
        if self.size == 1:
            return found
        mine = found or {}
        described = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mine.items()}
        forms = self.share(None if found is None else described)
        if forms is None:
            return None
        return {
            name: self.broadcast(mine[name].contiguous() if self.first else torch.empty(shape, dtype=kind))
            for name, (shape, kind) in forms.items()
        }

    @property
    def one_machine(self) -> bool:
        """Returns whether all ranks are on this machine, and so see the same files."""
        return self.local_size == self.size

    def wait_for_all(self) -> None:
        self.agree([0])

    def apart(self) -> Ranks:
        """Returns this rank as one that shares no rows: where several ranks hold one network, all of them see all
        rows."""
        return Ranks(rank=0, size=1, device=self.device, device_ranks=self.device_ranks)


@contextmanager
def open_world(*, gpu: bool, group: bool = False, per_gpu: int = 1) -> Iterator[Ranks]:
    """Returns this rank among those that torchrun started; alone without torchrun, as a group of one if `group`.

    `per_gpu`: as many consecutive ranks share a GPU. NCCL refuses that ("duplicate GPU"), gloo does not.
    """
    rank, local_rank, size, local_size = environment.torchrun_place()
    device = torch.device("cuda", local_rank // per_gpu) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    group = group or size > 1
    if group:
        backend = f"cpu:gloo,cuda:{'nccl' if per_gpu == 1 else 'gloo'}" if gpu else "gloo"
        file = environment.meeting_file()
        if file is None:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, init_method=file.as_uri(), rank=rank, world_size=size)
    shared = min(per_gpu, local_size) if gpu else 1
    try:
        yield Ranks(
            rank=rank, size=size, device=device, group=group, local_size=local_size, device_ranks=shared
        )
    finally:
        if group:
            dist.destroy_process_group()
