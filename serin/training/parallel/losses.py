"""The loss of a step: the mean over its rows, weighted by class where the spec says so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from serin.formats.schema import Task

Loss = Callable[[Tensor, Tensor], Tensor]


def loss_of(task: Task, *, scale: Tensor | None = None, weights: Tensor | None = None) -> Loss:
    """Returns (logits float[n, outputs], target float[n], or [n, k] of several) -> scalar. `scale`: a regression's
    unit.

    For logits float[n, members, outputs] it is the mean over the members, each by itself.
    """
    return _of_each_member(_loss_of(task, scale, weights))


def _of_each_member(loss: Loss) -> Loss:
    def mean(answers: Tensor, target: Tensor) -> Tensor:
        if answers.dim() < 3:
            return loss(answers, target)
        same = target.unsqueeze(1).expand(-1, answers.shape[1], *target.shape[1:])
        return loss(answers.flatten(0, 1), same.flatten(0, 1))

    return mean


def _loss_of(task: Task, scale: Tensor | None, weights: Tensor | None) -> Loss:
    match task:
        case "binary":
            return _weighted(_binary, weights)
        case "multiclass":
            return _weighted(_multiclass, weights)
        case "regression":  # in standard units, so that the learning rate does not depend on the target's
            unit = torch.ones(()) if scale is None else scale
            return lambda values, target: functional.mse_loss(
                _like(values, target).float() / unit, target / unit
            )


def _like(answers: Tensor, target: Tensor) -> Tensor:
    """Shapes the target like the answers: one column per target; without columns where there is one target."""
    return answers[:, 0] if target.dim() == 1 else answers


def _weighted(each: Callable[[Tensor, Tensor, str], Tensor], weights: Tensor | None) -> Loss:
    if weights is None:
        return lambda logits, target: each(logits, target, "mean")
    return lambda logits, target: (each(logits, target, "none") * weights[target.long()]).mean()


def _binary(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
    answers = _like(logits, target).float()
    return functional.binary_cross_entropy_with_logits(answers, target, reduction=reduction)


def _multiclass(logits: Tensor, target: Tensor, reduction: str) -> Tensor:
    return functional.cross_entropy(logits.float(), target.long(), reduction=reduction)
