"""Gathers whole tensors from sharded ones, and shards them again. A plain tensor is already whole."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor


def full(tensor: Tensor) -> Tensor:
    """Returns the whole tensor on every rank; all ranks must call it."""
    whole: Tensor = tensor.full_tensor() if _distributed(tensor) else tensor
    return whole.detach()


def local(tensor: Tensor) -> Tensor:
    """Returns the part of the tensor that this rank has."""
    mine: Tensor = tensor.to_local() if _distributed(tensor) else tensor
    return mine


def sharded(tensor: Tensor) -> bool:
    """Returns whether other ranks have other parts of it."""
    return _distributed(tensor) and any(placement.is_shard() for placement in tensor.placements)


def distributed(tensor: Tensor) -> bool:
    """Returns whether it is a DTensor, whole or in parts: operations do not mix those with plain tensors."""
    return _distributed(tensor)


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Copies `whole`, the same on all ranks, into `target`, of which each rank keeps its shard."""
    if not _distributed(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import (
        distribute_tensor,  # half a second of import that a run on one device can save
    )

    target.copy_(distribute_tensor(whole.to(target.device), target.device_mesh, target.placements))


def _distributed(tensor: Any) -> TypeGuard[Any]:
    return hasattr(tensor, "full_tensor")
