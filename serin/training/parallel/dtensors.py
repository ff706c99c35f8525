"""Whole tensors out of sharded ones, and back. A plain tensor is its own whole."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor


def full(tensor: Tensor) -> Tensor:
    """The tensor on every rank; all ranks must ask."""
    whole: Tensor = tensor.full_tensor() if _distributed(tensor) else tensor
    return whole.detach()


def local(tensor: Tensor) -> Tensor:
    """The part of it that this rank has."""
    mine: Tensor = tensor.to_local() if _distributed(tensor) else tensor
    return mine


def sharded(tensor: Tensor) -> bool:
    """Do other ranks have other parts of it?"""
    return _distributed(tensor) and any(placement.is_shard() for placement in tensor.placements)


def distributed(tensor: Tensor) -> bool:
    """Is it a DTensor, whole or in parts? Operations do not mix those with plain tensors."""
    return _distributed(tensor)


@torch.no_grad()
def fill(target: Tensor, whole: Tensor) -> None:
    """Puts `whole`, the same on all ranks, into `target`, of which each rank keeps its shard."""
    if not _distributed(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import (
        distribute_tensor,  # half a second that a run on one device need not pay
    )

    target.copy_(distribute_tensor(whole.to(target.device), target.device_mesh, target.placements))


def _distributed(tensor: Any) -> TypeGuard[Any]:
    return hasattr(tensor, "full_tensor")
