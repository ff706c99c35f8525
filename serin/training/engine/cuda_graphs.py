"""Runs several training steps in one CUDA graph launch. Pays off when a step is shorter than its launch overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from serin.training.data.loader import Loader

_RATES = 1024  # learning rates copied to the device at a time


class GraphLoader(Protocol):
    count: int

    def __call__(self, rows: Tensor, rates: Tensor) -> Tensor: ...


class GraphedSteps:
    def __init__(self, many: GraphLoader, loader: Loader, device: torch.device) -> None:
        self._many, self._loader, self._device = many, loader, device
        self.count = many.count
        self._first, self._rates = 0, torch.empty(0)

    def run(self, step: int, rate_at: Callable[[int], float]) -> Tensor:
        """Returns the losses of the `count` steps from `step` on, which must be in one epoch."""
        at = step - self._first
        if at < 0 or at + self.count > len(self._rates):
            ahead = min(_RATES, self._loader.steps_per_epoch - step % self._loader.steps_per_epoch)
            self._rates = torch.tensor([rate_at(step + number) for number in range(ahead)]).to(self._device)
            self._first, at = step, 0
        return self._many(self._loader.rows_of_many(step, self.count), self._rates[at : at + self.count])
