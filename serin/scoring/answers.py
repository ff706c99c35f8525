"""What a graph must answer for a model's output. Does not import torch."""

from __future__ import annotations

import numpy as np

from serin.formats.schema import Task
from serin.formats.wire import Array


def answers(logits: Array, task: Task) -> dict[str, Array]:
    """Returns the answers that the graph must give for a model's output, by name."""
    match task:
        case "binary":
            return {"score": _sigmoid(logits)}
        case "multiclass":
            return {"label": np.argmax(logits, axis=1, keepdims=True), "probabilities": _softmax(logits)}
        case "regression":
            return {"score": np.asarray(logits)}


def _sigmoid(logits: Array) -> Array:
    """Computed in float64, by a power of e that cannot overflow."""
    wide = logits.astype(np.float64)
    power = np.exp(-np.abs(wide))
    return (np.where(wide < 0, power, 1.0) / (1.0 + power)).astype(logits.dtype)


def _softmax(logits: Array) -> Array:
    wide = logits.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    shares: Array = powers / powers.sum(axis=1, keepdims=True)
    return shares.astype(logits.dtype)
