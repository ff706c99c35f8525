"""How good answers are once their truth is known: metrics with bands, a bounded loss per row, and reliability.

The export measures the test rows with these functions and the watcher the live rows, so the numbers compare. Bands are
95% normal approximations that treat rows as independent: DeLong's variance for AUC, Agresti and Coull's for shares, the
variance of the rows' losses otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from serin.formats.gate import Measured
from serin.formats.schema import Task
from serin.metrics import estimate

Array = npt.NDArray[Any]

CONFIDENCE: Final = 0.95
LOSS_OF_TASK: Final[Mapping[Task, str]] = {
    "binary": "brier",
    "multiclass": "error",
    "regression": "squared_error",
}
METRICS_OF_TASK: Final[Mapping[Task, tuple[str, ...]]] = {
    "binary": ("auc", "logloss", "brier", "accuracy", "calibration"),
    "multiclass": ("accuracy", "logloss"),
    "regression": ("rmse", "calibration"),
}

_SURE: Final = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_BINS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Rows with similar scores: their mean score and the share of them that are positive, or whose class is right."""

    score: float
    rate: float
    rows: int


def row_loss(task: Task, truth: Array, scores: Array, *, scale: float = 1.0, clip: float = 1.0) -> Array:
    """The loss of each row, from 0 to `clip`: the squared difference of a probability, 1 for a wrong class, the squared
    error divided by `scale`. Several targets give their mean."""
    if truth.ndim == 2:
        columns = range(truth.shape[1])
        each = [row_loss(task, truth[:, at], scores[:, at], scale=scale, clip=clip) for at in columns]
        return np.asarray(np.mean(each, axis=0))
    if task == "multiclass":
        return np.asarray(scores.argmax(axis=1) != truth, np.float64)
    difference = scores.astype(np.float64) - truth
    return np.minimum(difference * difference / scale, clip)


def measured(task: Task, truth: Array, scores: Array, targets: tuple[str, ...] = ()) -> dict[str, Measured]:
    """Every metric of the task that these rows give, with its band; one without a band (AUC of a class with few rows)
    has infinite ends. With several targets, a metric for each is called by its name."""
    found: dict[str, Measured] = {}
    for suffix, own, given in by_target(truth, scores, targets):
        for name in METRICS_OF_TASK[task]:
            try:
                value, error = _estimate(name, own, given)
            except ValueError:
                continue  # one class has no AUC
            found[f"{name}{suffix}"] = _band(name, value, error)
    return found


def by_target(truth: Array, scores: Array, targets: tuple[str, ...]) -> Iterator[tuple[str, Array, Array]]:
    """Truth and answers of each target, with the suffix of its metrics; a single one has none."""
    if not targets:
        yield "", truth, scores
        return
    for at, name in enumerate(targets):
        yield f"_{name}", truth[:, at], scores[:, at]


def reliability(task: Task, truth: Array, scores: Array, bins: int = _BINS) -> tuple[Reliability, ...]:
    """Scores in bins of equal numbers of rows, against the truth; of several classes, the probability of the chosen one
    against whether it is right. Empty for a regression and for several targets."""
    if task == "regression" or truth.ndim == 2 or not len(truth):
        return ()
    score, right = confidence(task, truth, scores)
    order = np.argsort(score, kind="stable")
    found = []
    for part in np.array_split(order, min(bins, len(order))):
        rate, mean = float(right[part].mean()), float(score[part].mean())
        found.append(Reliability(score=mean, rate=rate, rows=len(part)))
    return tuple(found)


def confidence(task: Task, truth: Array | None, scores: Array) -> tuple[Array, Array]:
    """The probability that is compared with the truth, and the truth about it (empty without `truth`)."""
    if task == "binary":
        return scores.astype(np.float64), np.zeros(0) if truth is None else truth
    right = np.zeros(0) if truth is None else np.asarray(scores.argmax(axis=1) == truth, np.float64)
    return scores.max(axis=1).astype(np.float64), right


def _estimate(name: str, truth: Array, scores: Array) -> tuple[float, float]:
    match name:
        case "auc" | "logloss" | "accuracy" | "rmse":
            return estimate(name, truth, scores)
        case "brier":
            return _mean((scores.astype(np.float64) - truth) ** 2)
        case _:  # calibration in the large: by how much answers are too high on average
            return _mean(scores.astype(np.float64) - truth)


def _mean(values: Array) -> tuple[float, float]:
    if not len(values):
        raise ValueError("no rows to measure on")
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf
    return float(values.mean()), error


def _band(name: str, value: float, error: float) -> Measured:
    low, high = value - _SURE * error, value + _SURE * error
    if name in ("auc", "accuracy", "brier"):
        low, high = max(low, 0.0), min(high, 1.0)
    if name in ("logloss", "rmse"):
        low = max(low, 0.0)
    return Measured(value=value, low=low, high=high)
