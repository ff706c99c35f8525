"""The networks in plain, hand-written torch, which the peers and the limit train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.training.table import CROSSES, EMBEDDING, NUMERIC, SIZES


class Network(nn.Module):
    def __init__(self, kind: str, hidden: list[int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sum(SIZES), EMBEDDING)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING**-0.5)
        self.register_buffer("offsets", torch.tensor([0, *SIZES[:-1]]).cumsum(0))
        width = NUMERIC + EMBEDDING * len(SIZES)
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(CROSSES if kind == "dcn" else 0))
        layers: list[nn.Module] = []
        before = width
        for units in hidden:
            layers += [nn.Linear(before, units), nn.ReLU()]
            before = units
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(before + (width if kind == "dcn" else 0), 1)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        row = torch.cat([num, self.embedding(cat + self.offsets).flatten(1)], dim=1)
        deep, crossed = self.layers(row), row
        for cross in self.crosses:
            crossed = row * cross(crossed) + crossed
        return self.head(torch.cat([crossed, deep], dim=1) if self.crosses else deep)[:, 0]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finish(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)
