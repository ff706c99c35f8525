"""Chooses the weights of a blend by the answers for rows that the models did not see. Pure; does not import torch.

Greedy selection with repetition after Caruana et al. (2004): begin with the best model, add the one that improves the
mean of all added so far most, and keep the best mean on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from serin.formats.shards import Array

MOST_MEMBERS = 4  # each one costs its time in every request
_ROUNDS = 25


def choose_weights(
    margins: Mapping[str, Array], goodness: Callable[[Array], float], *, blend: bool = True
) -> dict[str, float]:
    """Returns the weight of each chosen model, the largest first; they add up to 1. `goodness` of margins: higher is
    better."""
    alone = {name: goodness(margin) for name, margin in margins.items()}
    first = max(alone, key=lambda name: alone[name])
    taken, total = Counter([first]), margins[first].astype("float64")
    best, chosen = alone[first], Counter(taken)
    for count in range(1, _ROUNDS if blend and len(margins) > 1 else 1):
        allowed = [name for name in margins if name in taken or len(taken) < MOST_MEMBERS]
        tried = {name: goodness((total + margins[name]) / (count + 1)) for name in allowed}
        name = max(tried, key=lambda each: tried[each])
        taken[name] += 1
        total = total + margins[name]
        if tried[name] > best:
            best, chosen = tried[name], Counter(taken)
    return {name: count / chosen.total() for name, count in chosen.most_common()}
