"""How good scores are: exact, in numpy, independent of row order.

A metric that cannot be computed raises ValueError; it never returns a number that looks like a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SMALLEST = float(
    np.finfo(np.float32).eps
)  # a float32 sigmoid rounds to 0 or 1 long before the model is that sure
Metric = Literal["auc", "average_precision", "logloss", "accuracy", "rmse"]
HIGHER_IS_BETTER = ("auc", "average_precision", "accuracy")
_FEWEST_OF_A_CLASS = 10  # for an error of AUC that can be relied on


def auc(target: ArrayLike, score: ArrayLike) -> float:
    """The share of (positive, negative) pairs that `score` orders rightly; a tie counts as half.

    Pairs are counted as integers, so the result is exact and the row order does not matter.
    """
    positive, ranked = _pair(target, score)
    truth = _binary(positive)
    positives = int(np.count_nonzero(truth))
    negatives = truth.size - positives
    if positives == 0 or negatives == 0:
        raise ValueError(
            f"AUC needs both classes; the target has {positives} positive and {negatives} negative rows"
        )
    rank, truth = _sorted_by_score(ranked, truth)
    # Half-pairs per group of equal scores: a positive beats each negative below (2), ties with its group (1).
    last_of_group = np.append(np.flatnonzero(rank[1:] != rank[:-1]), rank.size - 1)
    positives_to = np.cumsum(truth, dtype=np.int64)[last_of_group]
    negatives_to = last_of_group + 1 - positives_to
    positives_in = np.diff(positives_to, prepend=0)
    negatives_below = np.concatenate(([0], negatives_to[:-1]))
    half_pairs = int(np.sum(positives_in * (negatives_below + negatives_to)))
    return half_pairs / (2 * positives * negatives)


def average_precision(target: ArrayLike, score: ArrayLike) -> float:
    """The mean precision over the positive rows, each at its own score: for positives that are rare.

    Rows with equal scores count together, as one threshold; the row order does not matter.
    """
    positive, ranked = _pair(target, score)
    truth = _binary(positive)
    if not truth.any():
        raise ValueError("average precision needs a positive row; the target has none")
    rank, truth = _sorted_by_score(ranked, truth)
    first_of_group = np.flatnonzero(np.append(True, rank[1:] != rank[:-1]))
    positives_from = np.cumsum(truth[::-1], dtype=np.int64)[::-1][first_of_group]
    positives_in = -np.diff(positives_from, append=0)
    precision = positives_from / (truth.size - first_of_group)
    return float(positives_in @ precision / positives_from[0])


def measure(metric: Metric, target: ArrayLike, scores: ArrayLike) -> float:
    """The metric of scores [n], or of probabilities [n, k] for the accuracy and log loss of several classes. Log loss
    is in nats, a root mean squared error in the target's unit."""
    if metric == "auc":
        return auc(target, scores)
    if metric == "average_precision":
        return average_precision(target, scores)
    mean = float(_row_losses(metric, *_pair(target, scores)).mean())
    return math.sqrt(mean) if metric == "rmse" else mean


def paired_bootstrap(
    metric: Metric,
    target: ArrayLike,
    ours: ArrayLike,
    theirs: ArrayLike,
    *,
    resamples: int = 1000,
) -> NDArray[np.float64]:
    """How the two models' metric differs (ours - theirs) in each of many resamples of the same rows, drawn with
    replacement. Resamples that cannot be measured (AUC with one class) are left out; ValueError when all are.

    `ours`, `theirs`: scores as for `measure`.
    """
    measures = [_resampled(metric, *_pair(target, scores)) for scores in (ours, theirs)]
    rows = len(np.asarray(target))
    random = np.random.default_rng(0)
    differences, weights = np.empty(resamples), np.empty(rows)
    for at in range(resamples):
        weights[:] = np.bincount(random.integers(0, rows, rows), minlength=rows)
        differences[at] = measures[0](weights) - measures[1](weights)
    known = differences[~np.isnan(differences)]
    if not known.size:
        raise ValueError(f"no resample of {rows} rows gives a {metric}")
    return known


def estimate(
    metric: Literal["auc", "logloss", "accuracy", "rmse"], target: ArrayLike, scores: ArrayLike
) -> tuple[float, float]:
    """Returns the metric and its standard error as an estimate for all rows like these: DeLong's for AUC, which is
    infinite with fewer than 10 rows of a class, else from the variance of the rows' losses. `scores` as for
    `measure`."""
    truth, given = _pair(target, scores)
    if metric == "auc":
        return auc(truth, given), _auc_error(_binary(truth), given)
    each = _row_losses(metric, truth, given)
    if metric == "accuracy":
        return estimate_share(each)
    error = float(each.std(ddof=1) / np.sqrt(len(each))) if len(each) > 1 else float("inf")
    mean = float(each.mean())
    if metric == "logloss":
        return mean, error
    return float(np.sqrt(mean)), error / (2 * float(np.sqrt(mean))) if mean else 0.0


def estimate_share(members: ArrayLike) -> tuple[float, float]:
    """The share of true rows and its standard error, with two rows of each kind added for the error only (Agresti and
    Coull): a share of 0 or 1 among few rows is not certain."""
    true = np.asarray(members).astype(np.bool_)
    if not true.size:
        raise ValueError("no rows to measure on")
    count, rows = int(np.count_nonzero(true)), true.size
    likely = (count + 2) / (rows + 4)
    return count / rows, float(np.sqrt(likely * (1 - likely) / (rows + 4)))


def _auc_error(truth: NDArray[np.bool_], scores: NDArray[Any]) -> float:
    """DeLong, DeLong and Clarke-Pearson (1988), from the ranks among all rows and within each class."""
    positives, negatives = scores[truth], scores[~truth]
    if min(len(positives), len(negatives)) < _FEWEST_OF_A_CLASS:
        return float("inf")
    ranks = _middle_ranks(scores)
    above = (ranks[truth] - _middle_ranks(positives)) / len(negatives)
    below = (ranks[~truth] - _middle_ranks(negatives)) / len(positives)
    return float(np.sqrt(above.var(ddof=1) / len(positives) + below.var(ddof=1) / len(negatives)))


def _middle_ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return ranks


def _row_losses(metric: str, truth: NDArray[Any], scores: NDArray[Any]) -> NDArray[np.float64]:
    """What each row adds to the mean that the metric is made of."""
    if metric == "rmse":
        return np.asarray((scores.astype(np.float64) - truth) ** 2)
    if metric == "accuracy":
        guess = scores > 0.5 if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(guess == truth, np.float64)
    if scores.ndim == 1:
        given = np.where(_binary(truth), scores, 1.0 - scores)
    else:
        given = scores[np.arange(truth.size), _labels(truth, scores.shape[1])]
    return np.asarray(-np.log(np.clip(given.astype(np.float64), _SMALLEST, 1.0)))


def _resampled(
    metric: str, truth: NDArray[Any], scores: NDArray[Any]
) -> Callable[[NDArray[np.float64]], float]:
    """The metric as a function of how often each row was drawn; NaN where it has no value."""
    if metric in ("auc", "average_precision"):
        return (_resampled_auc if metric == "auc" else _resampled_precision)(_binary(truth), scores)
    each = _row_losses(metric, truth, scores)
    if metric == "rmse":
        return lambda weights: float(np.sqrt(weights @ each / len(each)))
    return lambda weights: float(weights @ each / len(each))


def _resampled_auc(truth: NDArray[np.bool_], scores: NDArray[Any]) -> Callable[[NDArray[np.float64]], float]:
    """Each class is sorted once; a resample is then sums along the order. They are written to the same memory each
    time: requesting new memory can take several times as long as the sums."""
    positives, negatives = (
        rows[np.argsort(scores[rows])] for rows in (np.flatnonzero(truth), np.flatnonzero(~truth))
    )
    places = [np.searchsorted(scores[negatives], scores[positives], side) for side in ("left", "right")]
    drawn, drawn_negatives = np.empty(len(positives)), np.empty(len(negatives))
    negatives_to, beaten = np.zeros(len(negatives) + 1), np.empty(len(positives))

    def auc_of(weights: NDArray[np.float64]) -> float:
        weights.take(positives, out=drawn, mode="clip")  # the default mode would copy `out`
        weights.take(negatives, out=drawn_negatives, mode="clip")
        np.cumsum(drawn_negatives, out=negatives_to[1:])
        pairs = drawn.sum() * negatives_to[-1]
        if not pairs:
            return float("nan")
        half_pairs = 0.0
        for place in places:  # a positive beats the negatives below it, and half of those with its score
            half_pairs += float(drawn @ negatives_to.take(place, out=beaten, mode="clip"))
        return float(half_pairs / (2 * pairs))

    return auc_of


def _resampled_precision(
    truth: NDArray[np.bool_], scores: NDArray[Any]
) -> Callable[[NDArray[np.float64]], float]:
    """Sorted once, the highest score first; a resample is then two sums along the order."""
    order = np.argsort(scores, kind="stable")[::-1]
    ranked, positive = scores[order], truth[order]
    starts = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))

    def precision_of(weights: NDArray[np.float64]) -> float:
        drawn = weights[order]
        positives = np.add.reduceat(np.where(positive, drawn, 0.0), starts)
        rows = np.cumsum(np.add.reduceat(drawn, starts))
        if not positives.any():
            return float("nan")
        precision = np.cumsum(positives) / np.maximum(rows, 1.0)
        return float(positives @ precision / positives.sum())

    return precision_of


def mean_and_each(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several targets, {target: {metric: value}}: the mean of a metric that all have, then each one's."""
    names = [name for name in next(iter(found.values())) if all(name in each for each in found.values())]
    means = {name: sum(each[name] for each in found.values()) / len(found) for name in names}
    own = {f"{name}_{target}": value for target, each in found.items() for name, value in each.items()}
    return {**means, **own}


def _pair(target: ArrayLike, score: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    truth, scores = np.asarray(target), np.asarray(score)
    if truth.ndim != 1 or scores.shape[:1] != truth.shape:
        raise ValueError(
            f"target and scores must be one per row; shapes are {truth.shape} and {scores.shape}"
        )
    if truth.size == 0:
        raise ValueError("no rows to measure on")
    if scores.dtype.kind == "f" and bool(np.isnan(scores).any()):
        raise ValueError(f"{int(np.isnan(scores).sum())} of {truth.size} rows have a NaN as score")
    return truth, scores


def _binary(target: NDArray[Any]) -> NDArray[np.bool_]:
    truth = target > 0
    if not bool(np.all(truth == target)):
        raise ValueError("a binary target holds 0 and 1 only")
    return truth


def _labels(target: NDArray[Any], classes: int) -> NDArray[np.int64]:
    labels = target.astype(np.int64)
    if not bool(np.all((labels == target) & (labels >= 0) & (labels < classes))):
        raise ValueError(f"a target for {classes} classes must have integers from 0 to {classes - 1}")
    return labels


def _sorted_by_score(score: NDArray[Any], truth: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    if score.dtype != np.float32:
        order = np.argsort(score)
        return score[order], truth[order]
    # Float bits that rise with the value, with the truth as lowest bit: one plain sort of integers, twice as
    # fast as an argsort and two gathers. Adding 0.0 turns -0.0 into 0.0, which must tie.
    bits = (score + np.float32(0.0)).view(np.uint32)
    rising = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    packed = np.sort((rising << np.uint64(1)) | truth)
    return packed >> np.uint64(1), (packed & np.uint64(1)).astype(np.bool_)
