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


# In the type of the logits, as torch and ONNX Runtime compute: a score that is 0 there must be 0 here, or rows that are
# tied there would have an order.
def _sigmoid(logits: Array) -> Array:
    with np.errstate(over="ignore"):  # far below zero: 1 / inf
        scores: Array = 1 / (1 + np.exp(-logits))
    return scores


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Array = powers / powers.sum(axis=1, keepdims=True)
    return shares
