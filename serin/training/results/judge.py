"""Computes the metrics of scores by task, with the same names for every kind of model. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from serin import metrics
from serin.formats.schema import Task
from serin.formats.shards import Array

_METRICS: Mapping[Task, tuple[metrics.Metric, ...]] = {
    "binary": ("auc", "average_precision", "logloss"),
    "multiclass": ("logloss", "accuracy"),
    "regression": ("rmse",),
}


def judge_scores(target: Array, scores: Array, task: Task, targets: Sequence[str] = ()) -> dict[str, float]:
    """Returns metrics by name. AUC and average precision are left out where only one class is present.

    With several targets: the mean of each metric, and the metric of each as auc_<name>.
    """
    if targets:
        each = [judge_scores(target[:, at], scores[:, [at]], task) for at in range(len(targets))]
        return metrics.mean_and_each(dict(zip(targets, each, strict=True)))
    given = scores if task == "multiclass" else np.ascontiguousarray(scores[:, 0])
    names = _METRICS[task]
    if task == "binary" and target.min() == target.max():
        names = ("logloss",)
    return {name: metrics.measure(name, target, given) for name in names}
