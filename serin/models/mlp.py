"""Embeddings and a multi-layer perceptron: a strong first network for a table."""

from __future__ import annotations

from torch import Tensor, nn

from serin.models.shape import TableShape
from serin.models.table import Cut, TableNetwork, chain_cuts, dense_layers, linear_chain
from serin.spec.model import ModelSpec


class Mlp(TableNetwork):
    def __init__(self, spec: ModelSpec, shape: TableShape) -> None:
        super().__init__(shape, spec)
        self.layers = dense_layers(self.width, spec.hidden, spec.dropout)
        self.head = nn.Linear(spec.hidden[-1], shape.outputs)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        return self.in_units(self.head(self.layers(self.flat(num, cat))))

    def cuts(self, ranks: int) -> dict[str, Cut]:
        chain = [*linear_chain("layers", self.layers), ("head", self.head)]
        return super().cuts(ranks) | chain_cuts(chain, ranks)
