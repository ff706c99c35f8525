"""The quality benchmark: settings chosen with the same effort; ranks, distances and the metrics that are compared."""

import json

import numpy as np
import optuna
import pytest

from benchmarks.quality.benchmark import CHOSEN, mean_ranks, show_table, summary
from benchmarks.quality.learners import LEARNERS, SPACES, TREES
from benchmarks.quality.score import score
from benchmarks.quality.spaces import CONTENDERS


@pytest.mark.parametrize("name", CONTENDERS)
def test_what_is_trained_is_the_best_of_what_was_tried_and_inside_its_space(name: str) -> None:
    document = json.loads(CHOSEN.read_text())
    chosen, contender = document["contenders"][name], CONTENDERS[name]
    whole = [trial for trial in chosen["trials"] if len(trial["auc"]) == document["folds"]]
    best = max(whole, key=lambda trial: sum(trial["auc"]))
    assert chosen["settings"] == best["settings"]
    assert chosen["mean_auc"] == pytest.approx(sum(best["auc"]) / len(best["auc"]))
    fixed = {
        path: json.dumps(value) if path in contender.choice else value
        for path, value in best["settings"].items()
        if path not in contender.fixed
    }
    assert contender.suggest(optuna.trial.FixedTrial(fixed)) == best["settings"]


def test_every_contender_had_the_same_number_of_trials_on_the_same_blocks() -> None:
    document = json.loads(CHOSEN.read_text())
    assert set(document["contenders"]) == set(CONTENDERS)
    assert {len(one["trials"]) for one in document["contenders"].values()} == {12}


SCORES = {
    "flights": {"serin auto": 0.71, "serin network": 0.70, "xgboost": 0.72, "catboost": 0.71},
    "churn": {"serin auto": 0.93, "serin network": 0.90, "xgboost": 0.91, "catboost": 0.92},
}


def test_equal_scores_share_a_rank_and_our_network_is_not_ranked_beside_auto() -> None:
    assert mean_ranks(SCORES) == {"serin auto": 1.75, "xgboost": 2.0, "catboost": 2.25}


def test_the_last_line_compares_auto_with_the_best_other_and_the_network_with_the_best_trees() -> None:
    assert summary(SCORES) == pytest.approx(
        {
            "rank_auto": 1.75,
            "rank_best_other": 2.0,
            "rank_behind": -0.25,
            "network_gap": 0.02,
            "auc_gap": 0.01,
        }
    )


def test_a_contender_that_is_missing_leaves_a_gap_in_the_table() -> None:
    lines = show_table({**SCORES, "adult": {"serin auto": 0.9}}, dict.fromkeys((*SCORES, "adult"), "AUC"))
    assert lines[3].split() == ["adult", "AUC", "0.9000", "-", "-", "-"]


def test_every_metric_is_one_for_a_perfect_answer_and_lower_for_a_worse_one() -> None:
    target = np.array([0.0, 1.0, 1.0, 0.0])
    assert score(target, target, "binary") == 1.0
    assert score(target, np.eye(2)[target.astype(int)], "multiclass") == 1.0
    assert score(target, target, "regression") == 1.0
    assert score(target, np.full(4, 0.5), "regression") == 0.0


def test_every_learner_has_a_space_that_draws_something_new_each_time() -> None:
    assert LEARNERS.keys() == SPACES.keys() >= set(TREES)
    random = np.random.default_rng(0)
    assert all(draw(random) != draw(random) for draw in SPACES.values())
