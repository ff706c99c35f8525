"""Several networks of one kind that are trained side by side and answer together: `model: {ensemble_size: 4}`.

They see the same rows in the same steps and share nothing else, so that their errors differ. The rest of Serin sees one
model: one file of weights, one optimizer, one graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from serin.models.shape import TableShape
from serin.models.table import Cut, Divisible, units_of


class Ensemble(Divisible):
    """(num, cat) -> float32[n, members, outputs] during training, so that each member is judged by itself.

    Afterwards it returns their mean, float32[n, outputs]: of logits, or of values in a regression.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, members: Iterable[nn.Module], shape: TableShape) -> None:
        """Combines `members`, which answer in standard units: the target's unit is applied to all of them together."""
        super().__init__()
        self.members = nn.ModuleList(members)
        self.has_units = shape.units
        self.register_buffer("scale", torch.ones(units_of(shape)))
        self.register_buffer("shift", torch.zeros(units_of(shape)))

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        answers = torch.stack([member(num, cat) for member in self.members], dim=1)
        answers = answers if self.training else answers.mean(dim=1)
        return answers * self.scale + self.shift if self.has_units else answers

    def cuts(self, ranks: int) -> dict[str, Cut]:
        return {
            f"members.{number}.{name}": cut
            for number, member in enumerate(self.members)
            for name, cut in cast("Divisible", member).cuts(ranks).items()
        }
