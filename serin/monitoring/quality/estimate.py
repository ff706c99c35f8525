"""What the metrics of answers are expected to be before labels are known. Pure.

A calibrated probability says how often it is right, so the scores alone give an expectation: accuracy, Brier score, log
loss and AUC in a binary task, accuracy with several classes. Scores are calibrated by the reliability of the test rows.
There is no such estimate for a regression or for several targets, and none sees a change in what follows from the same
columns: it is an estimate, shown with its measured error once labels are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from serin.formats.schema import Task

Array = npt.NDArray[Any]

BINS: Final = 512
_LARGEST: Final = 12.0  # log-odds
_SMALLEST: Final = float(np.finfo(np.float32).eps)


def count_scores(confidence: Array) -> dict[str, int]:
    """Scores as counts by place: equal steps of log-odds, fine enough for chances of any size."""
    chance = np.clip(confidence.astype(np.float64), 1e-9, 1 - 1e-9)
    odds = np.clip(np.log(chance / (1 - chance)), -_LARGEST, _LARGEST)
    place = np.minimum((odds + _LARGEST) / (2 * _LARGEST) * BINS, BINS - 1).astype(np.int64)
    kinds, counts = np.unique(place, return_counts=True)
    return {str(kind): int(count) for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)}


def add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {place: one.get(place, 0) + other.get(place, 0) for place in one.keys() | other.keys()}


def expected(
    task: Task, counts: Mapping[str, int], reliability: Sequence[Sequence[float]]
) -> dict[str, float]:
    """The expected metrics of rows with these scores; empty for a task without an estimate, or without rows."""
    if task == "regression" or not counts:
        return {}
    places = np.array(sorted(int(place) for place in counts))
    rows = np.array([counts[str(place)] for place in places], np.float64)
    odds = (places + 0.5) / BINS * 2 * _LARGEST - _LARGEST
    score = 1 / (1 + np.exp(-odds))
    chance = _calibrated(score, reliability)
    if task == "multiclass":
        return {"accuracy": float(rows @ chance / rows.sum())}
    given = np.clip(score, _SMALLEST, 1 - _SMALLEST)
    each = {
        "logloss": -(chance * np.log(given) + (1 - chance) * np.log(1 - given)),
        "brier": chance * (1 - score) ** 2 + (1 - chance) * score**2,
        "accuracy": np.where(score > 0.5, chance, 1 - chance),
    }
    found = {name: float(rows @ values / rows.sum()) for name, values in each.items()}
    positive, negative = rows * chance, rows * (1 - chance)
    pairs = positive.sum() * negative.sum()
    if pairs:
        below = np.cumsum(negative) - negative
        found["auc"] = float(positive @ (below + negative / 2) / pairs)
    return found


def _calibrated(scores: Array, reliability: Sequence[Sequence[float]]) -> Array:
    """The rates that belong to scores, by the bins of the test rows made monotonic (pool adjacent violators)."""
    if not reliability:
        return scores
    pools: list[list[float]] = []  # rate, rows, first score, last score
    for score, rate, rows in reliability:
        pools.append([rate, rows, score, score])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            rate, rows, _, last = pools.pop()
            before = pools[-1]
            before[0] = (before[0] * before[1] + rate * rows) / (before[1] + rows)
            before[1], before[3] = before[1] + rows, last
    known = [(score, pool[0]) for pool in pools for score in dict.fromkeys((pool[2], pool[3]))]
    return np.interp(scores, [score for score, _ in known], [rate for _, rate in known])
