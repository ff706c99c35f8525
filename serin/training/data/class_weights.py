"""Computes the weight of each class in the loss. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from serin.formats.shards import Array


def class_weights(
    wanted: Sequence[float] | Literal["balanced"] | None, target: Sequence[Array], classes: int
) -> list[float] | None:
    """Returns one weight per class, with mean 1 over the training rows, so that the learning rate keeps its meaning.

    Raises ValueError when the number of weights is not that of the classes.
    """
    if wanted is None:
        return None
    counts = sum(np.bincount(part.astype(np.int64), minlength=classes) for part in target)
    shares = np.asarray(counts, np.float64) / np.sum(counts)
    if wanted == "balanced":
        chosen = 1.0 / np.maximum(shares, 1.0 / np.sum(counts))
    elif len(wanted) != classes:
        raise ValueError(
            f"training.class_weights has {len(wanted)} weights, but the target has {classes} classes"
        )
    else:
        chosen = np.asarray(wanted, np.float64)
    return [float(weight) for weight in chosen / np.sum(chosen * shares)]
