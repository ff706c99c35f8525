"""What scores are worth, by the task: the same names for every kind of model. No torch here."""

from __future__ import annotations

import numpy as np

from serin import metrics
from serin.formats.schema import Task
from serin.formats.shards import Array


def judge_scores(target: Array, scores: Array, task: Task) -> dict[str, float]:
    """Metrics by name. AUC is left out where only one class is there: it cannot be measured."""
    match task:
        case "binary":
            chance = np.ascontiguousarray(scores[:, 0])
            known = {"logloss": metrics.log_loss(target, chance)}
            return {"auc": metrics.auc(target, chance), **known} if target.min() != target.max() else known
        case "multiclass":
            return {
                "logloss": metrics.log_loss(target, scores),
                "accuracy": metrics.accuracy(target, scores.argmax(axis=1)),
            }
        case "regression":
            return {"rmse": metrics.rmse(target, scores[:, 0])}
