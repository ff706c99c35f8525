"""A user's network with its own table."""

import torch
from torch import Tensor, nn


class Table(nn.Module):
    def __init__(self, numeric: int, sizes: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(sizes), 8)
        self.head = nn.Linear(numeric + 8 * len(sizes), outputs)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        answer: Tensor = self.head(torch.cat([num, self.table(cat).flatten(1)], dim=1))
        return answer
