"""What a graph must answer for a network's output."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from serin.formats.schema import Task
from serin.formats.wire import Array


def scores_of(logits: Tensor, task: Task) -> Tensor:
    """Returns the answers of the served model: a probability, one per class, or the value."""
    match task:
        case "binary":
            return torch.sigmoid(logits)
        case "multiclass":
            return torch.softmax(logits, dim=1)
        case "regression":
            return logits


def answers(logits: Array, task: Task) -> dict[str, Array]:
    """Returns the answers that the graph must give for a network's output, by name."""
    tensor = torch.from_numpy(np.ascontiguousarray(logits))
    scores = scores_of(tensor, task).numpy()
    if task != "multiclass":
        return {"score": scores}
    return {"label": torch.argmax(tensor, dim=1, keepdim=True).numpy(), "probabilities": scores}
