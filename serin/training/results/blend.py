"""Chooses the weights of a blend on the valid rows. Pure; does not import torch.

Greedy selection (Caruana et al., 2004): begin with the best model and add, with repetition, the one that improves the
blend most; a model's weight is the share of additions it got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from serin.formats.shards import Array

MOST_MEMBERS = 3  # each one costs its time in every request
_ROUNDS = 12


def choose_weights(
    margins: Mapping[str, Array], goodness: Callable[[Array], float], *, blend: bool = True
) -> dict[str, float]:
    """Returns the weight of each chosen model, the largest first; they add up to 1. `goodness` of margins: higher is
    better."""
    alone = {name: goodness(margin) for name, margin in margins.items()}
    best_name = max(alone, key=lambda name: alone[name])
    counts, best = {best_name: 1}, alone[best_name]
    total = margins[best_name].astype("float64")
    for size in range(1, _ROUNDS if blend else 1):
        allowed = margins if len(counts) < MOST_MEMBERS else counts
        tried = {name: goodness((total + margins[name]) / (size + 1)) for name in allowed}
        name = max(tried, key=lambda each: tried[each])
        if not tried[name] > best:
            break
        counts[name], best = counts.get(name, 0) + 1, tried[name]
        total = total + margins[name]
    added = sum(counts.values())
    ordered = sorted(counts, key=lambda each: -counts[each])
    return {name: counts[name] / added for name in ordered}
