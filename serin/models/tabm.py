"""TabM (Gorishniy et al., 2024): an ensemble of multi-layer perceptrons that share their matrices.

Each member has its own scale of every layer's inputs and outputs, its own biases and its own head. They learn side by
side, each judged by itself, and answer with the mean of their probabilities.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from serin.models.shape import TableShape
from serin.models.table import TableNetwork
from serin.spec.model import ModelSpec


class SharedLinear(nn.Module):
    """float[n, members, inputs] -> float[n, members, outputs]: out * (W (into * x)) + b, with one W for all."""

    def __init__(self, inputs: int, outputs: int, members: int, *, varied: bool) -> None:
        """`varied`: members begin with other signs of their inputs; the rest of them begins equal."""
        super().__init__()
        self.shared = nn.Linear(inputs, outputs, bias=False)
        signs = torch.randint(0, 2, (members, inputs)) * 2.0 - 1.0
        self.into = nn.Parameter(signs if varied else torch.ones(members, inputs))
        self.out = nn.Parameter(torch.ones(members, outputs))
        bound = inputs**-0.5
        self.bias = nn.Parameter((torch.rand(outputs) * 2 - 1).mul(bound).repeat(members, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.shared(x * self.into) * self.out + self.bias
        return result


class TabM(TableNetwork):
    def __init__(self, spec: ModelSpec, shape: TableShape) -> None:
        super().__init__(shape, spec)
        members, width = spec.members, self.width
        layers: list[nn.Module] = []
        for number, units in enumerate(spec.hidden):
            layers += [SharedLinear(width, units, members, varied=number == 0), nn.ReLU()]
            if spec.dropout:
                layers.append(nn.Dropout(spec.dropout))
            width = units
        self.layers = nn.Sequential(*layers)
        bound = width**-0.5
        self.heads = nn.Parameter((torch.rand(members, width, shape.outputs) * 2 - 1) * bound)
        self.head_bias = nn.Parameter((torch.rand(members, shape.outputs) * 2 - 1) * bound)

    def forward(self, num: Tensor, cat: Tensor) -> Tensor:
        """Returns float32[n, members, outputs] during training, afterwards float32[n, outputs]."""
        hidden = self.layers(self.flat(num, cat).unsqueeze(1))
        answers = torch.matmul(hidden.transpose(0, 1), self.heads).transpose(0, 1) + self.head_bias
        if self.training:
            return self.in_units(answers)
        return self.in_units(answers.mean(dim=1)) if self.has_units else mean_probability(answers)


def mean_probability(logits: Tensor) -> Tensor:
    """float[n, members, outputs] -> the logits of the members' mean probability: of one output, or of classes."""
    if logits.shape[2] > 1:
        return _log_mean(functional.log_softmax(logits, dim=2))
    return _log_mean(functional.logsigmoid(logits)) - _log_mean(functional.logsigmoid(-logits))


def _log_mean(logs: Tensor) -> Tensor:
    return torch.logsumexp(logs, dim=1) - math.log(logs.shape[1])
