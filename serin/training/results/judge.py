"""Computes the metrics of scores by task, with the same names for every kind of model. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from serin import metrics
from serin.formats.schema import Task
from serin.formats.shards import Array

_METRICS: Mapping[Task, tuple[metrics.Metric, ...]] = {
    "binary": ("auc", "average_precision", "logloss"),
    "multiclass": ("logloss", "accuracy"),
    "regression": ("rmse",),
}


ERROR: Final = " (standard error)"
"""What follows a metric's name in the name of its standard error."""


def judge_scores(
    target: Array, scores: Array, task: Task, targets: Sequence[str] = (), *, errors: bool = False
) -> dict[str, float]:
    """Returns metrics by name. AUC and average precision are left out where only one class is present.

    With several targets: the mean of each metric, and the metric of each as auc_<name>. `errors`: also the standard
    errors of those that have one.
    """
    if targets:
        each = [judge_scores(target[:, at], scores[:, [at]], task) for at in range(len(targets))]
        return metrics.mean_and_each(dict(zip(targets, each, strict=True)))
    given = scores if task == "multiclass" else np.ascontiguousarray(scores[:, 0])
    names = _METRICS[task]
    if task == "binary" and target.min() == target.max():
        names = ("logloss",)
    found: dict[str, float] = {name: metrics.measure(name, target, given) for name in names}
    return {**found, **_errors(names, target, given)} if errors else found


def _errors(names: Sequence[metrics.Metric], target: Array, scores: Array) -> dict[str, float]:
    found = {name: metrics.estimate(name, target, scores)[1] for name in names if name != "average_precision"}
    return {f"{name}{ERROR}": value for name, value in found.items() if math.isfinite(value)}
