"""Shared parts of Serin's networks: the category table, columns as one row of numbers, answers in the target's unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from serin.models.numbers import Numbers
from serin.models.shape import TableShape
from serin.spec.model import ModelSpec

_WIDEST_AUTO = 32

# How several ranks may split a layer: a table by its rows; a matrix by its outputs, which stay split for the next layer
# or are gathered; or by its inputs, which come split from the layer before.
Cut = Literal["table", "outputs", "outputs_gathered", "inputs"]


def auto_embedding(sizes: Sequence[int]) -> int:
    """Returns the embedding width by the largest vocabulary: 4 for ten codes, 16 for four thousand, at most 32."""
    return min(_WIDEST_AUTO, 4 * math.ceil(math.sqrt(math.sqrt(max(sizes))) / 2))


class CategoryTable(nn.Embedding):
    """One table for all categorical columns, each at its own offset: one gather in the step, one tensor to update.

    After `by_row()` the table is no longer a weight of the optimizer: the rows that a training step gathered, and their
    gradient, are stored in `touched` for an optimizer that updates those rows alone.
    """

    offsets: Tensor

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        super().__init__(sum(sizes), width)
        nn.init.normal_(self.weight, std=width**-0.5)
        starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        self.register_buffer("offsets", starts, persistent=False)
        self.touched: list[tuple[Tensor, Tensor]] | None = None

    def by_row(self) -> None:
        self.weight.requires_grad_(False)
        self.touched = []

    def forward(self, codes: Tensor) -> Tensor:
        rows = codes + self.offsets
        found: Tensor = super().forward(rows)
        if self.touched is None or not self.training:
            return found
        leaf = found.detach().requires_grad_()
        self.touched.append((rows, leaf))
        return leaf


class AnswersInUnits(nn.Module):
    """A network whose answers are logits or, in a regression, learned in standard units and given in the target's."""

    scale: Tensor
    shift: Tensor

    def __init__(self, shape: TableShape) -> None:
        super().__init__()
        self.has_units = shape.units
        size = (
            (shape.outputs,) if shape.units and shape.outputs > 1 else ()
        )  # one number, or one for each target
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("shift", torch.zeros(size))

    def in_units(self, values: Tensor) -> Tensor:
        return values * self.scale + self.shift if self.has_units else values


class Divisible(AnswersInUnits):
    """A network that declares how several ranks may split its layers."""

    def cuts(self, ranks: int) -> dict[str, Cut]:
        """Returns the splits for so many ranks, by the layer's name; other layers are the same on all of them."""
        raise NotImplementedError


class TableNetwork(Divisible):
    """(num float32[n, k], cat int64[n, m]) -> float32[n, outputs]: logits, or the value itself in a regression."""

    def __init__(self, shape: TableShape, spec: ModelSpec, *, token_width: int | None = None) -> None:
        """`token_width`: every column is a vector of this width, in a network that embeds numbers by itself."""
        super().__init__(shape)
        self.numeric = shape.numeric
        self.categories: CategoryTable | None = None
        self.numbers: Numbers | None = None
        self.width = shape.numeric  # of a flattened row
        robust = spec.numeric_scaling == "robust"
        embedded = spec.numeric_embedding if token_width is None else "none"
        if shape.numeric and (robust or embedded != "none"):
            self.numbers = Numbers(shape.numeric, robust=robust, embedding=embedded)
            self.width = self.numbers.width
        if shape.sizes:
            size = token_width or (
                auto_embedding(shape.sizes) if spec.embedding == "auto" else spec.embedding
            )
            self.categories = CategoryTable(shape.sizes, size)
            self.width += size * len(shape.sizes)

    def flat(self, num: Tensor, cat: Tensor) -> Tensor:
        """Concatenates all columns: float32[n, width]."""
        parts = [self.scaled(num)] if self.numeric else []
        if self.categories is not None:
            parts.append(self.categories(cat).flatten(1))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def scaled(self, num: Tensor) -> Tensor:
        """Returns the numbers as the spec wants them: as they are, scaled, or as the vectors of their columns."""
        return num if self.numbers is None else self.numbers(num)

    def cuts(self, ranks: int) -> dict[str, Cut]:
        enough = self.categories is not None and len(self.categories.weight) >= ranks
        return {"categories": "table"} if enough else {}


def chain_cuts(chain: Sequence[tuple[str, nn.Linear]], ranks: int) -> dict[str, Cut]:
    """Splits consecutive matrices in pairs, so that ranks communicate once per pair, where the sizes divide."""
    cuts: dict[str, Cut] = {}
    at = 0
    while at < len(chain):
        name, layer = chain[at]
        if at + 1 < len(chain) and layer.out_features % ranks == 0:
            cuts |= {name: "outputs", chain[at + 1][0]: "inputs"}
            at += 2
            continue
        if layer.out_features % ranks == 0:
            cuts[name] = "outputs_gathered"
        at += 1
    return cuts


def linear_chain(prefix: str, layers: nn.Sequential) -> list[tuple[str, nn.Linear]]:
    return [
        (f"{prefix}.{number}", layer) for number, layer in enumerate(layers) if isinstance(layer, nn.Linear)
    ]


def dense_layers(width: int, hidden: Sequence[int], dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = units
    return nn.Sequential(*layers)
