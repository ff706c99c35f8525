"""AdamW on a CPU without the bookkeeping of torch's optimizer around its fused kernel.

Most of that bookkeeping (hooks, profiler ranges, grouping tensors by device, collecting the state) repeats the same
answer at every step. In a small network it takes a tenth of the step. The kernel and its arguments are the same, and so
are the weights, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One group's tensors, in the order of its weights. `steps`: those of all weights in one tensor."""

    settings: dict[str, Any]
    weights: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: Tensor
    step_of_each: list[Tensor]


class DirectAdamW(torch.optim.AdamW):
    def __init__(self, groups: list[Any], lr: float) -> None:
        super().__init__(groups, lr=lr, fused=True)
        self._ready: list[_Group] | None = None

    def update(self) -> None:
        """Does what `step` does. The first one makes the state; one without all gradients is left to torch."""
        if self._ready is None:
            self.step()
            if all(self.state.get(weight) for group in self.param_groups for weight in group["params"]):
                self._ready = [self._collect(group) for group in self.param_groups]
            return
        gradients = [[weight.grad for weight in group.weights] for group in self._ready]
        if any(gradient is None for each in gradients for gradient in each):
            self.step()
            return
        with torch.no_grad():
            for group, each in zip(self._ready, gradients, strict=True):
                _update(group, each)

    def _collect(self, group: dict[str, Any]) -> _Group:
        weights, states = group["params"], [self.state[weight] for weight in group["params"]]
        steps = torch.stack([state["step"] for state in states])
        for state, step in zip(states, steps.unbind(), strict=True):
            state["step"] = step  # a view: one addition counts for all
        return _Group(
            settings=group,
            weights=weights,
            means=[state["exp_avg"] for state in states],
            squares=[state["exp_avg_sq"] for state in states],
            steps=steps,
            step_of_each=[state["step"] for state in states],
        )


def _update(group: _Group, gradients: list[Any]) -> None:
    group.steps.add_(1)
    settings = group.settings
    beta1, beta2 = settings["betas"]
    torch._fused_adamw_(  # torch has no public name for it
        group.weights, gradients, group.means, group.squares, [], group.step_of_each,
        amsgrad=False, lr=settings["lr"], beta1=beta1, beta2=beta2, weight_decay=settings["weight_decay"],
        eps=settings["eps"], maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip
