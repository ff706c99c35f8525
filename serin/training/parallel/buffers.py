"""Merges buffers that a network changes while it learns, such as BatchNorm's running statistics, over all ranks.

Ranks that divide a step's rows each change their own copy. At the end of an epoch, before scoring and saving, all ranks
get the same values: the mean of floats, the maximum of integers, and a flag that is set if one rank has set it. Rows
are divided at random, so the mean of the ranks' running means and variances estimates those of all rows. The first
rank's copy for all would ignore the rows of the other ranks.

A checkpoint in the middle of an epoch must not change the run, whenever it is written: it stores the merged values, for
any other number of ranks, and those of each rank, for the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from serin.training.parallel.dtensors import distributed
from serin.training.parallel.ranks import Ranks


class Buffers:
    """The buffers of a network. `rows`: the ranks among which a step's rows are divided. Create it before the first
    step."""

    def __init__(self, network: nn.Module, rows: Ranks) -> None:
        self._network, self._rows = network, rows
        several = rows.size > 1
        self._first = {name: _on_host(buffer) for name, buffer in self._here().items()} if several else {}

    def bring_together(self) -> None:
        """Gives every rank the merged values. All ranks must call it."""
        names = self._changed()
        if not names:
            return
        mine = self._mine(names)
        of_ranks = self._gather(mine)
        values = _merge_all(of_ranks) if of_ranks else mine
        fill_buffers(self._network, _unpack(self._rows.broadcast(_pack(values)), like=mine))

    def collect(self) -> dict[str, Tensor]:
        """Returns buffers for a checkpoint: merged as `model.NAME`, each rank's own as `buffer.RANKofSIZE.NAME` if they
        differ.

        The result is on the first rank; the others get nothing. All ranks must call it.
        """
        names = self._changed()
        of_ranks = self._gather(self._mine(names)) if names else []
        if not of_ranks:
            return {}
        values = _merge_all(of_ranks)
        apart = {name for name in names for own in of_ranks if not torch.equal(own[name], values[name])}
        found = {f"model.{name}": value for name, value in values.items()}
        for rank, own in enumerate(of_ranks):
            found |= {f"{self._key(rank)}.{name}": own[name] for name in sorted(apart)}
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores this rank's own values, after the merged ones were loaded."""
        prefix = f"{self._key(self._rows.rank)}."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        fill_buffers(self._network, own)

    def _key(self, rank: int) -> str:
        return f"buffer.{rank}of{self._rows.size}"

    def _here(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self._network.named_buffers() if not distributed(buffer)}

    def _mine(self, names: Sequence[str]) -> dict[str, Tensor]:
        here = self._here()
        return {name: _on_host(here[name]) for name in names}

    def _changed(self) -> list[str]:
        """Returns the buffers that differ from their first value on any rank. One whose shape changes is a cache of
        each rank."""
        here, flags = self._here(), []
        for name, first in self._first.items():
            odd = name not in here or not _alike(here[name], first)
            flags += [odd, not odd and not torch.equal(here[name].cpu(), first)]
        agreed = self._rows.agree([int(flag) for flag in flags]) if flags else []
        every = zip(self._first, agreed[::2], agreed[1::2], strict=True)
        return [name for name, odd, moved in every if moved and not odd]

    def _gather(self, mine: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        return [_unpack(packed, like=mine) for packed in self._rows.gather(_pack(mine))]


def merged(values: Sequence[Tensor]) -> Tensor:
    """Merges the values of all ranks, in the order of the ranks. A value that is equal on all of them is kept."""
    first, every = values[0], torch.stack(list(values))
    if first.dtype == torch.bool:
        return every.any(dim=0)
    if not (first.is_floating_point() or first.is_complex()):
        return every.amax(dim=0)
    wide = torch.complex128 if first.is_complex() else torch.float64
    mean = every.to(wide).mean(dim=0).to(first.dtype)
    return torch.where((every == first).all(dim=0), first, mean)  # keeps -inf and what a mean would round


@contextmanager
def buffers_kept(network: nn.Module) -> Iterator[None]:
    """Restores the network's buffers after the block."""
    before = {name: buffer.detach().clone() for name, buffer in network.named_buffers()}
    try:
        yield
    finally:
        fill_buffers(network, before)


@torch.no_grad()
def fill_buffers(network: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copies into the existing tensors, which a captured step continues to use. A buffer that has grown is a cache."""
    for name, buffer in network.named_buffers():
        if name in values and _alike(buffer, values[name]):
            buffer.copy_(values[name])


def _merge_all(of_ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: merged([own[name] for own in of_ranks]) for name in of_ranks[0]}


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def _on_host(buffer: Tensor) -> Tensor:
    return buffer.detach().to("cpu", copy=True).contiguous()


def _pack(tensors: Mapping[str, Tensor]) -> Tensor:
    """Packs all bytes into one message, whatever the types."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])


def _unpack(packed: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sizes = [tensor.numel() * tensor.element_size() for tensor in like.values()]
    return {
        name: piece.clone().view(tensor.dtype).reshape(tensor.shape)
        for (name, tensor), piece in zip(like.items(), torch.split(packed, sizes), strict=True)
    }
