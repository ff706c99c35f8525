"""Gathers whole tensors from sharded ones, and shards them again. A plain tensor is already whole."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor


def full(tensor: Tensor) -> Tensor:
    """Returns the whole tensor on every rank; all ranks must call it."""
    if not distributed(tensor):
        return tensor.detach()
    mesh, placement = tensor.device_mesh, tensor.placements[0]
    if mesh.ndim > 1 or placement.is_partial():
        whole: Tensor = tensor.full_tensor()
        return whole.detach()
    mine = local(tensor).detach()
    return _gathered(mine, placement.dim, tensor.shape[placement.dim], mesh) if placement.is_shard() else mine


def _gathered(mine: Tensor, dim: int, length: int, mesh: Any) -> Tensor:
    """Joins the shards of a dimension. DTensor's own gathering crashes with gloo on a GPU: it gives gloo addresses of
    the GPU's memory."""
    ranks = mesh.size()
    each = -(-length // ranks)  # the last shards may be shorter, or empty
    padded = mine.new_zeros([each if at == dim else size for at, size in enumerate(mine.shape)])
    padded.narrow(dim, 0, mine.shape[dim]).copy_(mine)
    pieces = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(pieces, padded, group=mesh.get_group())
    return torch.cat(pieces, dim=dim).narrow(dim, 0, length)


def local(tensor: Tensor) -> Tensor:
    """Returns the part of the tensor that this rank has."""
    mine: Tensor = tensor.to_local() if distributed(tensor) else tensor
    return mine


def sharded(tensor: Tensor) -> bool:
    """Returns whether other ranks have other parts of it."""
    return distributed(tensor) and any(placement.is_shard() for placement in tensor.placements)


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Copies `whole`, the same on all ranks, into `target`, of which each rank keeps its shard."""
    if not distributed(target):
        target.copy_(whole)
        return
    # Half a second of import that a run on one device can save.
    from torch.distributed.tensor import distribute_tensor

    whole = whole.to(target.device)
    target.copy_(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))


def distributed(tensor: Any) -> TypeGuard[Any]:
    """Returns whether it is a DTensor, whole or in parts: operations do not mix those with plain tensors."""
    return hasattr(tensor, "full_tensor")
