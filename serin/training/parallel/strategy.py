"""Chooses how processes share a network, from its size, the device's memory and the number of ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from serin.spec.training import Strategy

_FOR_STATE = 0.5  # of a device's memory; the rest is for rows and activations


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """The memory needs of a training in bytes, and how it could be divided."""

    state: int  # weights, gradients and the optimizer's state
    largest: int  # the weights of the largest part that FSDP must gather: a table or a layer
    device: int  # memory of one rank's device
    ranks: int
    cuts: bool  # its layers can be split
    stages: int  # into how many consecutive pieces it can be split; 0 when it does not say


def choose_strategy(
    wanted: Literal["auto"] | Strategy, weight: TrainingMemory, *, by_row: bool = False
) -> tuple[Strategy, str]:
    """Returns (strategy, reason). Raises ValueError, with the reason, for one that is impossible.

    `by_row`: large tables are updated row by row, which only DDP supports, whose ranks have whole tables.
    """
    if weight.ranks == 1:
        return "ddp", "one process"
    if wanted != "auto":
        reason = _unfit(wanted, weight, by_row=by_row)
        if reason:
            raise ValueError(f"training.strategy={wanted}: {reason}")
        return wanted, "asked for"
    room = int(weight.device * _FOR_STATE)
    size = f"{_gb(weight.state)} of weights, gradients and optimizer"
    if by_row or weight.state <= room:
        return "ddp", f"{size} fit into {_gb(room)} on every device"
    if weight.state // weight.ranks + 2 * weight.largest <= room:
        return "fsdp", f"{size} do not fit into {_gb(room)}, but do when sharded over {weight.ranks}"
    if not _unfit("tensor", weight, by_row=by_row):
        return (
            "tensor",
            f"{size}, with {_gb(weight.largest)} in one part, are too large to be gathered on a device",
        )
    if not _unfit("pipeline", weight, by_row=by_row):
        return "pipeline", f"{size} are too large for a device, and the network names its stages"
    return "fsdp", f"{size} may not fit, and the network can only be sharded"


def _unfit(wanted: Strategy, weight: TrainingMemory, *, by_row: bool) -> str:
    if by_row and wanted != "ddp":
        return "tables that are updated row by row must be whole on every rank; set embedding_updates: dense"
    if wanted == "tensor" and not weight.cuts:
        return "this network's layers cannot be split for tensor parallelism; use mlp, dcn, ft_transformer or fsdp"
    if wanted == "pipeline" and not weight.stages:
        return (
            "the network names no stages; ft_transformer does, and your own can (stages = ('embed', 'head'))"
        )
    if wanted == "pipeline" and weight.stages < weight.ranks:
        return f"{weight.stages} stages do not fill {weight.ranks} processes"
    return ""


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
