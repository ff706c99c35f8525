"""Deep and cross network, version 2 (Wang et al., 2020): products of columns of bounded degree beside an MLP."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from serin.models.shape import TableShape
from serin.models.table import Cut, TableNetwork, chain_cuts, dense_layers, linear_chain
from serin.spec.model import ModelSpec

_LARGEST_RANK = 256  # of a cross layer: wider rows use two low-rank matrices, as the paper proposes


class Cross(nn.Module):
    """x -> row * (W x + b) + x, where `row` is the network's input: one more degree of interaction."""

    def __init__(self, width: int) -> None:
        super().__init__()
        full = nn.Linear(width, width)
        thin = nn.Sequential(nn.Linear(width, _LARGEST_RANK, bias=False), nn.Linear(_LARGEST_RANK, width))
        self.mix = full if width <= 2 * _LARGEST_RANK else thin

    def forward(self, row: Tensor, x: Tensor) -> Tensor:
        result: Tensor = row * self.mix(x) + x
        return result


class Dcn(TableNetwork):
    def __init__(self, spec: ModelSpec, shape: TableShape) -> None:
        super().__init__(shape, spec)
        self.crosses = nn.ModuleList(Cross(self.width) for _ in range(spec.cross_layers))
        self.layers = dense_layers(self.width, spec.hidden, spec.dropout)
        self.head = nn.Linear(self.width + spec.hidden[-1], shape.outputs)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        row = self.flat(num, cat)
        crossed = row
        for cross in self.crosses:
            crossed = cross(row, crossed)
        return self.in_units(self.head(torch.cat([crossed, self.layers(row)], dim=1)))

    def cuts(self, ranks: int) -> dict[str, Cut]:
        cuts = super().cuts(ranks) | chain_cuts(linear_chain("layers", self.layers), ranks)
        for number, cross in enumerate(self.crosses):
            name = f"crosses.{number}.mix"
            mix = cross.get_submodule("mix")
            chain = (
                [(name, mix)]
                if isinstance(mix, nn.Linear)
                else linear_chain(name, cast("nn.Sequential", mix))
            )
            cuts |= chain_cuts(chain, ranks)
        return cuts
