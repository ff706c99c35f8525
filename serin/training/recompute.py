"""Gradient checkpointing: what lies between the layers of a part is not kept but computed again on the way back."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from serin.models.ensemble import Ensemble
from serin.models.module import OwnNetwork
from serin.models.stages import stages_of


def recompute_parts(network: nn.Module) -> int:
    """Less memory for about a third more time; the gradients stay the same. How many parts are computed again.

    Parts are a transformer's blocks, the dense and cross layers of the other networks, the stages that one's own names;
    a network of one's own that names none is one part.
    """
    parts = _parts(network)
    for part in parts:
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    return len(parts)


def _parts(network: nn.Module) -> list[nn.Module]:
    if isinstance(network, Ensemble):
        return [part for member in network.members for part in _parts(member)]
    if isinstance(network, OwnNetwork):
        named = [network.get_submodule(stage.owns[0].rstrip(".")) for stage in stages_of(network)]
        return named or [network.network]
    blocks = getattr(network, "blocks", None)
    if blocks is not None:
        return list(blocks)
    return [getattr(network, "layers"), *getattr(network, "crosses", ())]  # noqa: B009
