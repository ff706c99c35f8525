"""Follows categories into a network: the calls of its embedding layers, and the column that each vector belongs to.

Nothing is assumed about how a network is written, only that categories enter through nn.Embedding: which codes a call
is given when one column changes says which of its vectors are that column's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from serin.export.explain.explanation import Unexplained
from serin.formats.wire import Array

Hook = Callable[[nn.Module, Any, Tensor], Tensor | None]


class Call(NamedTuple):
    """One call of an embedding layer: the codes [rows, ...] it was given, and the vectors [rows, ..., width]."""

    codes: Tensor
    vectors: Tensor


@contextmanager
def hooked(network: nn.Module, hook: Hook) -> Iterator[None]:
    """Lets `hook` see, and replace, what every embedding layer of the network gives."""
    layers = [module for module in network.modules() if isinstance(module, nn.Embedding)]
    hooks = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def record_calls(network: nn.Module, num: Tensor, cat: Tensor) -> list[Call]:
    """Returns the calls of embedding layers for these rows, in order."""
    seen: list[Call] = []

    def hook(_layer: nn.Module, given: Any, vectors: Tensor) -> None:
        seen.append(Call(given[0], vectors))

    with hooked(network, hook), torch.no_grad():
        network(num, cat)
    return seen


def find_owners(network: nn.Module, num: Tensor, cat: Tensor, baseline: Tensor) -> list[Array | None]:
    """For each call, which categorical column each of its vectors belongs to: float64[vectors, columns] of 0 and 1.
    None for a call that no column changes. `baseline`: codes int64[columns]."""
    start = baseline.expand(len(cat), -1)
    before = record_calls(network, num, start)
    owners = [np.zeros((call.codes[0].numel(), cat.shape[1])) for call in before]
    for column in range(cat.shape[1]):
        changed = start.clone()
        changed[:, column] = cat[:, column]
        after = record_calls(network, num, changed)
        if len(after) != len(before):
            raise Unexplained("its network calls other embedding layers for other categories")
        for owner, old, new in zip(owners, before, after, strict=True):
            moved = (old.codes != new.codes).reshape(len(old.codes), -1).any(dim=0).numpy()
            if moved.any() and len(old.codes) != len(cat):
                raise Unexplained("an embedding layer of its network does not have the rows first")
            owner[moved, column] = 1.0
    if any((owner.sum(axis=1) > 1).any() for owner in owners):
        raise Unexplained("an embedding layer of its network reads several columns at once")
    return [owner if owner.any() else None for owner in owners]
