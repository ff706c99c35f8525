"""One number for each task, higher for the better model and at most 1: AUC, accuracy, or R2."""

from __future__ import annotations

import numpy as np

from serin import metrics
from serin.formats.schema import Task


def score(target: np.ndarray, found: np.ndarray, task: Task) -> float:
    """`found`: the probability of 1, probabilities by class [n, k], or values."""
    if task == "binary":
        return metrics.auc(target, found.reshape(-1))
    if task == "multiclass":
        return metrics.measure("accuracy", target, found)
    wide, truth = found.reshape(-1).astype(np.float64), target.astype(np.float64)
    return float(1 - np.mean((wide - truth) ** 2) / np.var(truth))
