"""AUC and the other metrics, against what they are defined to be."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.metrics import auc, average_precision, measure, paired_bootstrap

log_loss, rmse = partial(measure, "logloss"), partial(measure, "rmse")


def pairwise_auc(target: np.ndarray, score: np.ndarray) -> float:
    above = score[target == 1][:, None] - score[target == 0][None, :]
    return float(((above > 0).sum() + 0.5 * (above == 0).sum()) / above.size)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([-3.5, -0.0, 0.0, 0.25, 0.25000003, 1.0, 7e30, -7e30])),
        min_size=2,
        max_size=60,
    ),
    st.sampled_from([np.float32, np.float64]),
)
def test_auc_is_the_share_of_rightly_ordered_pairs_with_ties_as_half(rows: list, dtype: type) -> None:
    target = np.array([positive for positive, _ in rows], np.float32)
    score = np.array([value for _, value in rows], dtype)
    if target.min() == target.max():
        with pytest.raises(ValueError, match="both classes"):
            auc(target, score)
    else:
        assert auc(target, score) == pytest.approx(pairwise_auc(target, score), abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([-3.5, -0.0, 0.0, 0.25, 1.0, 7e30])), min_size=1, max_size=60
    ),
    st.sampled_from([np.float32, np.float64]),
)
def test_average_precision_is_the_mean_precision_at_each_positive(rows: list, dtype: type) -> None:
    target = np.array([positive for positive, _ in rows], np.float32)
    score = np.array([value for _, value in rows], dtype)
    if not target.any():
        with pytest.raises(ValueError, match="needs a positive row"):
            average_precision(target, score)
        return
    at_each = [target[score >= own].mean() for own in score[target == 1]]
    assert average_precision(target, score) == pytest.approx(float(np.mean(at_each)), rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "target", "scores", "says"),
    [
        (auc, [0, 1, 1], np.array([0.1, np.nan, 0.2], np.float32), "1 of 3 rows have a NaN"),
        (auc, [0, 1, 2], [0.1, 0.2, 0.3], "0 and 1 only"),
        (log_loss, [0, 2], np.full((2, 2), 0.5), "integers from 0 to 1"),
        (rmse, [], [], "no rows"),
    ],
)
def test_what_cannot_be_measured_is_refused(metric: Any, target: Any, scores: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        metric(target, scores)


def test_log_loss_is_the_mean_over_binary_or_class_probabilities() -> None:
    assert log_loss([1, 0], [0.8, 0.4]) == pytest.approx(-(np.log(0.8) + np.log(0.6)) / 2)
    chances = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    assert log_loss([1, 2], chances) == pytest.approx(-(np.log(0.2) + np.log(0.8)) / 2)


def test_log_loss_stays_finite_when_the_model_is_sure_and_wrong() -> None:
    assert 10 < log_loss([1.0], np.array([0.0], np.float32)) < 20


def test_accuracy_counts_equal_labels() -> None:
    assert measure("accuracy", [0, 1, 2, 2], np.eye(3)[[0, 1, 1, 2]]) == 0.75
    assert measure("accuracy", [0, 1, 1, 0], [0.1, 0.9, 0.4, 0.5]) == 0.75


def test_rmse_is_in_the_unit_of_the_target() -> None:
    assert rmse([1.0, 2.0, 3.0], np.array([1.0, 2.0, 6.0], np.float32)) == pytest.approx(np.sqrt(3.0))


def resamples_of(rows: int, count: int) -> list[np.ndarray]:
    """The rows that the bootstrap draws, in its order."""
    random = np.random.default_rng(0)
    return [random.integers(0, rows, rows) for _ in range(count)]


@pytest.mark.parametrize("metric", ["auc", "average_precision", "logloss", "accuracy", "rmse"])
def test_a_bootstrap_gives_the_metric_s_difference_in_every_resample(metric: str) -> None:
    random = np.random.default_rng(4)
    target = (random.random(80) < 0.4).astype(np.float32)
    ours = np.round(np.clip(target * 0.3 + random.random(80) * 0.7, 0.01, 0.99), 1)  # with ties
    theirs = np.clip(random.random(80), 0.01, 0.99)
    compute = {
        "auc": auc,
        "average_precision": average_precision,
        "logloss": log_loss,
        "rmse": rmse,
        "accuracy": lambda truth, score: np.mean((score > 0.5) == truth),
    }[metric]
    wanted = [
        compute(target[drawn], ours[drawn]) - compute(target[drawn], theirs[drawn])
        for drawn in resamples_of(80, 20)
    ]
    found = paired_bootstrap(metric, target, ours, theirs, resamples=20)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_a_bootstrap_of_several_classes_takes_probabilities() -> None:
    random = np.random.default_rng(4)
    target = random.integers(0, 3, 60)
    ours, theirs = (random.dirichlet(np.ones(3), 60) for _ in range(2))
    for metric, compute in (
        ("logloss", log_loss),
        ("accuracy", lambda truth, chance: np.mean(chance.argmax(axis=1) == truth)),
    ):
        wanted = [compute(target[d], ours[d]) - compute(target[d], theirs[d]) for d in resamples_of(60, 9)]
        np.testing.assert_allclose(paired_bootstrap(metric, target, ours, theirs, resamples=9), wanted)


def test_the_same_model_differs_from_itself_in_no_resample_and_one_class_has_no_auc() -> None:
    target, score = np.array([0, 1, 1, 0]), np.array([0.1, 0.8, 0.7, 0.9])
    assert not paired_bootstrap("auc", target, score, score, resamples=50).any()
    with pytest.raises(ValueError, match="no resample of 4 rows gives a auc"):
        paired_bootstrap("auc", np.ones(4), score, score, resamples=5)
