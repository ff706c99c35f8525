"""Gradient checkpointing: what lies between the layers of a part is not kept but computed again on the way back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from serin.models.ensemble import Ensemble
from serin.models.foreign.module import OwnNetwork
from serin.models.stages import stages_of
from serin.training.parallel.buffers import buffers_kept, fill_buffers


def recompute_parts(network: nn.Module) -> int:
    """Less memory for about a third more time; the gradients stay the same. How many parts are computed again.

    Parts are a transformer's blocks, the dense and cross layers of the other networks, the stages that one's own names;
    a network of one's own that names none is one part.
    """
    parts = _parts(network)
    for part in parts:
        again = partial(checkpoint, part.forward, use_reentrant=False)
        if any(True for _ in part.buffers()):
            again = partial(again, context_fn=partial(_buffers_as_before, part))
        part.forward = again
    return len(parts)


def _buffers_as_before(part: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward pass and of its repetition, which must see the buffers as they were and leave them as they
    are: BatchNorm would count every batch twice."""
    before = {name: buffer.detach().clone() for name, buffer in part.named_buffers()}

    @contextmanager
    def repeated() -> Iterator[None]:
        with buffers_kept(part):
            fill_buffers(part, before)
            yield

    return nullcontext(), repeated()


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
