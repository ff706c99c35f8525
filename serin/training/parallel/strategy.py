"""How processes share a network, chosen from what it weighs, what a device holds and how many they are. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from serin.spec.training import Strategy

_FOR_STATE = 0.5  # of a device's memory; the rest is for rows and what lies between the layers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """What a training weighs, in bytes, and how it could be shared out."""

    state: int  # weights, gradients and the optimizer's state
    largest: int  # the weights of the largest part that FSDP must hold whole for a moment: a table or a layer
    device: int  # what one rank's device holds
    ranks: int
    cuts: bool  # can its layers be cut?
    stages: int  # into how many pieces, one after the other, it can be cut; 0 when it does not say


def choose_strategy(
    wanted: Literal["auto"] | Strategy, weight: TrainingMemory, *, by_row: bool = False
) -> tuple[Strategy, str]:
    """(strategy, why). ValueError, with the reason, for one that cannot be.

    `by_row`: are large tables updated row by row? Only DDP can, whose ranks hold whole tables.
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
        return "fsdp", f"{size} do not fit into {_gb(room)}, shared by {weight.ranks} they do"
    if not _unfit("tensor", weight, by_row=by_row):
        return (
            "tensor",
            f"{size}, and {_gb(weight.largest)} in one part, are too large to be gathered anywhere",
        )
    if not _unfit("pipeline", weight, by_row=by_row):
        return "pipeline", f"{size} are too large for a device, and the network names its stages"
    return "fsdp", f"{size} may not fit, and the network can only be sharded"


def _unfit(wanted: Strategy, weight: TrainingMemory, *, by_row: bool) -> str:
    if by_row and wanted != "ddp":
        return "tables that are updated row by row must be whole on every rank; set embedding_updates: dense"
    if wanted == "tensor" and not weight.cuts:
        return "nobody knows how this network's layers may be cut; use mlp, dcn or ft_transformer, or fsdp"
    if wanted == "pipeline" and not weight.stages:
        return (
            "the network names no stages; ft_transformer does, and one's own may (stages = ('embed', 'head'))"
        )
    if wanted == "pipeline" and weight.stages < weight.ranks:
        return f"{weight.stages} stages do not fill {weight.ranks} processes"
    return ""


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
