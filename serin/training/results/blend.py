"""Chooses the weights of a blend on the valid rows. Pure; does not import torch.

Greedy selection after Caruana et al. (2004): begin with the best model, and mix in, with repetition, the model and the
share of it that improve the blend most. Shares are coarse, because a few valid rows cannot tell finer ones apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from serin.formats.shards import Array

MOST_MEMBERS = 3  # each one costs its time in every request
_ROUNDS = 4
_SHARES = (0.1, 0.2, 0.35, 0.5)


def choose_weights(
    margins: Mapping[str, Array], goodness: Callable[[Array], float], *, blend: bool = True
) -> dict[str, float]:
    """Returns the weight of each chosen model, the largest first; they add up to 1. `goodness` of margins: higher is
    better."""
    alone = {name: goodness(margin) for name, margin in margins.items()}
    first = max(alone, key=lambda name: alone[name])
    weights, best, total = {first: 1.0}, alone[first], margins[first].astype("float64")
    for _ in range(_ROUNDS if blend else 0):
        allowed = [name for name in margins if name in weights or len(weights) < MOST_MEMBERS]
        tried = {
            (name, share): goodness((1 - share) * total + share * margins[name])
            for name in allowed
            for share in _SHARES
        }
        name, share = max(tried, key=lambda each: tried[each])
        if not tried[name, share] > best:
            break
        best, total = tried[name, share], (1 - share) * total + share * margins[name]
        weights = {each: (1 - share) * weight for each, weight in weights.items()}
        weights[name] = weights.get(name, 0.0) + share
    return dict(sorted(weights.items(), key=lambda item: -item[1]))
