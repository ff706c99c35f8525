"""Computes the metrics of scores by task, with the same names for every kind of model. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serin import metrics
from serin.formats.schema import Task
from serin.formats.shards import Array


def judge_scores(target: Array, scores: Array, task: Task, targets: Sequence[str] = ()) -> dict[str, float]:
    """Returns metrics by name. AUC and average precision are left out where only one class is present.

    With several targets: the mean of each metric, and the metric of each as auc_<name>.
    """
    if targets:
        each = [judge_scores(target[:, at], scores[:, [at]], task) for at in range(len(targets))]
        return metrics.mean_and_each(dict(zip(targets, each, strict=True)))
    match task:
        case "binary":
            chance = np.ascontiguousarray(scores[:, 0])
            known = {"logloss": metrics.log_loss(target, chance)}
            if target.min() == target.max():
                return known
            precision = metrics.average_precision(target, chance)
            return {"auc": metrics.auc(target, chance), "average_precision": precision, **known}
        case "multiclass":
            return {
                "logloss": metrics.log_loss(target, scores),
                "accuracy": metrics.accuracy(target, scores.argmax(axis=1)),
            }
        case "regression":
            return {"rmse": metrics.rmse(target, scores[:, 0])}
