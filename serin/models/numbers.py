"""How numbers enter a network: robust scaling with a smooth clip, and an embedding of each numeric column.

Both follow RealMLP (Holzmüller et al., 2024) and "On embeddings for numerical features" (Gorishniy et al., 2022). They
are layers, so that training, the served graph and explanations use the same code. Their statistics come from the train
rows, by `fit`, and are saved with the weights.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from serin.formats.shards import Array, SplitArrays

Embedding = Literal["none", "periodic", "piecewise_linear"]

_CLIP = 3.0  # of scaled numbers: what is far beyond it comes close to it
_BINS = 16
_FREQUENCIES = 16
_FREQUENCY_SCALE = 0.1  # small: a function of a number is smooth until training finds otherwise
_PERIODIC_WIDTH = 4  # of a column's vector
_PIECEWISE_WIDTH = 8
_FITTED_ROWS = 200_000


class SmoothScaling(nn.Module):
    """(x - median) / (third quartile - first), clipped smoothly to (-3, 3). NaN stays NaN."""

    center: Tensor
    factor: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(columns))
        self.register_buffer("factor", torch.ones(columns))

    def fit(self, num: Array) -> None:
        low, middle, high = np.nanquantile(num, (0.25, 0.5, 0.75), axis=0)
        spread = high - low
        # Where half of the rows have one value, the range takes the place of the quartiles.
        spread = np.where(spread > 0, spread, (np.nanmax(num, axis=0) - np.nanmin(num, axis=0)) / 2)
        self.center.copy_(torch.as_tensor(np.nan_to_num(middle)))
        self.factor.copy_(torch.as_tensor(np.where(spread > 0, 1 / np.where(spread > 0, spread, 1), 0.0)))

    def forward(self, num: Tensor) -> Tensor:
        scaled = (num - self.center) * self.factor
        return scaled / torch.sqrt(1 + (scaled / _CLIP) ** 2)


class Periodic(nn.Module):
    """cos(2 pi (f x + b)) for learned frequencies, then one linear layer for each column; x itself is kept too."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.width = _PERIODIC_WIDTH
        made = self.width - 1
        self.frequencies = nn.Parameter(torch.randn(columns, _FREQUENCIES) * _FREQUENCY_SCALE)
        self.phases = nn.Parameter(torch.rand(columns, _FREQUENCIES) - 0.5)
        self.mix = nn.Parameter(_uniform(columns, _FREQUENCIES, made))
        self.bias = nn.Parameter(torch.zeros(columns, made))

    def forward(self, num: Tensor) -> Tensor:
        waves = torch.cos(2 * math.pi * (num.unsqueeze(2) * self.frequencies + self.phases))
        mixed = torch.relu(_by_column(waves, self.mix) + self.bias)
        return torch.cat([num.unsqueeze(2), mixed], dim=2)


class PiecewiseLinear(nn.Module):
    """How far x is through each bin of its column, from 0 to 1, then one linear layer for each column."""

    starts: Tensor
    factors: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.width = _PIECEWISE_WIDTH
        self.register_buffer("starts", torch.zeros(columns, _BINS))
        self.register_buffer("factors", torch.zeros(columns, _BINS))
        self.mix = nn.Parameter(_uniform(columns, _BINS, self.width))
        self.slope = nn.Parameter(torch.zeros(columns, self.width))
        self.bias = nn.Parameter(torch.zeros(columns, self.width))

    def fit(self, num: Array) -> None:
        """Takes quantiles as the bins' ends. A column of few values has fewer bins; the others stay 0."""
        for column in range(num.shape[1]):
            values = num[:, column]
            values = values[np.isfinite(values)]
            edges = np.unique(np.quantile(values, np.linspace(0, 1, _BINS + 1))) if len(values) else values
            count = max(0, len(edges) - 1)
            self.starts[column, :count] = torch.as_tensor(edges[:-1].copy())
            self.factors[column, :count] = torch.as_tensor(1 / np.diff(edges))

    def forward(self, num: Tensor) -> Tensor:
        x = num.unsqueeze(2)
        shares = ((x - self.starts) * self.factors).clamp(0, 1)
        return _by_column(shares, self.mix) + x * self.slope + self.bias


class Numbers(nn.Module):
    """float32[n, columns] -> float32[n, width]: scaled if `robust`, then embedded."""

    def __init__(self, columns: int, *, robust: bool, embedding: Embedding) -> None:
        super().__init__()
        self.scaling = SmoothScaling(columns) if robust else None
        self.embedding: Periodic | PiecewiseLinear | None = None
        match embedding:
            case "periodic":
                self.embedding = Periodic(columns)
            case "piecewise_linear":
                self.embedding = PiecewiseLinear(columns)
            case "none":
                pass
        self.width = columns * (self.embedding.width if self.embedding is not None else 1)

    @torch.no_grad()
    def fit(self, num: Array) -> None:
        if self.scaling is not None:
            self.scaling.fit(num)
            num = self.scaling(torch.from_numpy(np.array(num, np.float32))).numpy()
        if isinstance(self.embedding, PiecewiseLinear):
            self.embedding.fit(num)

    def forward(self, num: Tensor) -> Tensor:
        scaled = num if self.scaling is None else self.scaling(num)
        return scaled if self.embedding is None else self.embedding(scaled).flatten(1)


def fit_numbers(network: nn.Module, split: SplitArrays) -> None:
    """Gives the network the statistics of the train rows that it needs; the same on all ranks."""
    layers = [module for module in network.modules() if isinstance(module, Numbers)]
    if not layers:
        return
    every = -(-len(split) // _FITTED_ROWS)
    rows = np.concatenate([part[::every] for part in split.num])
    for layer in layers:
        layer.fit(rows)


def _by_column(values: Tensor, mix: Tensor) -> Tensor:
    """float[n, columns, a] and one matrix [a, b] for each column -> float[n, columns, b]."""
    return torch.matmul(values.transpose(0, 1), mix).transpose(0, 1)


def _uniform(columns: int, inputs: int, outputs: int) -> Tensor:
    return (torch.rand(columns, inputs, outputs) * 2 - 1) * float(inputs**-0.5)
