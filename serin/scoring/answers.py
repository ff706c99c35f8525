"""What a graph must answer for a network's output."""

from __future__ import annotations

import numpy as np
import torch

from serin.formats.schema import Task
from serin.formats.wire import Array


def answers(logits: Array, task: Task) -> dict[str, Array]:
    """Returns the answers that the graph must give for a network's output."""
    tensor = torch.from_numpy(np.ascontiguousarray(logits))
    match task:
        case "binary":
            return {"score": torch.sigmoid(tensor).numpy()}
        case "regression":
            return {"score": tensor.numpy()}
        case "multiclass":
            label = torch.argmax(tensor, dim=1, keepdim=True)
            return {"label": label.numpy(), "probabilities": torch.softmax(tensor, dim=1).numpy()}
