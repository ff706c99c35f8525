"""Embeddings and a multi-layer perceptron: the network that a table deserves first.

All categorical columns share one embedding table, each at its own offset: one gather in the step, one tensor for the
optimizer, however many columns there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from serin.models.shape import TableShape
from serin.spec.stages import ModelSpec

_WIDEST_AUTO = 32


def auto_embedding(sizes: Sequence[int]) -> int:
    """Numbers per category, by the largest vocabulary: 4 for ten codes, 16 for four thousand, at most 32."""
    return min(_WIDEST_AUTO, 4 * math.ceil(math.sqrt(math.sqrt(max(sizes))) / 2))


class Mlp(nn.Module):
    """(num float32[n, k], cat int64[n, m]) -> float32[n, outputs]: logits, or the value itself in a regression."""

    offsets: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, spec: ModelSpec, shape: TableShape) -> None:
        super().__init__()
        self.numeric = shape.numeric
        self.categories: nn.Embedding | None = None
        width = shape.numeric
        if shape.sizes:
            size = auto_embedding(shape.sizes) if spec.embedding == "auto" else spec.embedding
            self.categories = nn.Embedding(sum(shape.sizes), size)
            nn.init.normal_(self.categories.weight, std=size**-0.5)
            starts = torch.tensor([0, *shape.sizes[:-1]]).cumsum(0)
            self.register_buffer("offsets", starts, persistent=False)
            width += size * len(shape.sizes)
        self.layers = _layers(width, spec.hidden, spec.dropout)
        self.head = nn.Linear(spec.hidden[-1], shape.outputs)
        # A regression learns its target in standard units and answers in the target's own.
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        parts = [num] if self.numeric else []
        if self.categories is not None:
            parts.append(self.categories(cat + self.offsets).flatten(1))
        hidden = self.layers(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0])
        result: Tensor = self.head(hidden) * self.scale + self.shift
        return result


def _layers(width: int, hidden: Sequence[int], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = units
    return nn.Sequential(*layers)
