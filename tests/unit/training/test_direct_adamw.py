"""AdamW without torch's bookkeeping gives the same weights and the same state, bit by bit."""

from __future__ import annotations

import torch
from torch import nn

from serin.training.engine.direct_adamw import DirectAdamW

STEPS = 6


def train(
    kind: type[torch.optim.AdamW], *, unused_at: int | None = None
) -> tuple[nn.Module, torch.optim.AdamW]:
    """Trains with a rate that changes, decay for matrices alone, and optionally one layer left out of a step."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 5))
    weights = list(network.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": 0.1},
        {"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=0.01) if kind is DirectAdamW else kind(groups, lr=0.01, fused=True)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        optimizer.zero_grad()
        rows = torch.randn(64, 7)
        layers = network[:1] if step == unused_at else network
        layers(rows).square().mean().backward()
        optimizer.update() if isinstance(optimizer, DirectAdamW) else optimizer.step()
    return network, optimizer


def is_equal(unused_at: int | None) -> bool:
    (ours, direct), (theirs, plain) = (
        train(DirectAdamW, unused_at=unused_at),
        train(torch.optim.AdamW, unused_at=unused_at),
    )
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    return all(torch.equal(one, other) for one, other in pairs) and all(
        torch.equal(direct.state[one][name], plain.state[other][name])
        for one, other in pairs
        for name in ("step", "exp_avg", "exp_avg_sq")
    )


def test_weights_and_state_are_those_of_torch() -> None:
    assert is_equal(unused_at=None)


def test_a_weight_without_a_gradient_is_left_alone_as_torch_leaves_it() -> None:
    assert is_equal(unused_at=0)
    assert is_equal(unused_at=3)
