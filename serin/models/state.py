"""Saves and loads all tensors that a network's answers depend on, by name.

These are torch's state_dict and, for a user's module, also the buffers registered with `persistent=False`. state_dict
leaves those out, so a reloaded module would have their initial values: wrong for one that training changes, and
different where they are drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from serin.models.foreign.module import OwnNetwork


def state_of(network: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors themselves, not copies. On a rank of a pipeline those of other ranks are on the meta
    device."""
    transient = {name: buffer for name, buffer in _transient(network) if buffer is not None}
    return {**network.state_dict(), **transient}


@torch.no_grad()
def load_state(network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fills the network with the result of `state_of` for one of the same form.

    A non-persistent buffer that is missing on one side, or has another shape there, is a cache that the network makes
    at its first call or grows: it is left unchanged.
    """
    transient = dict(_transient(network))
    network.load_state_dict({name: tensor for name, tensor in state.items() if name not in transient})
    for name, buffer in transient.items():
        if buffer is not None and name in state and state[name].shape == buffer.shape:
            buffer.copy_(state[name])


def _transient(network: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    """Returns the non-persistent buffers of users' modules; None is one that does not exist yet."""
    for path, own in network.named_modules():
        if isinstance(own, OwnNetwork):
            for within, module in own.named_modules(prefix=path):
                for name in sorted(module._non_persistent_buffers_set):  # noqa: SLF001
                    yield f"{within}.{name}".lstrip("."), module._buffers[name]  # noqa: SLF001
