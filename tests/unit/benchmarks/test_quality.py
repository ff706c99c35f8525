"""The quality benchmark's settings: chosen with the same effort, and the best of what was tried."""

from __future__ import annotations

import json

import optuna
import pytest

from benchmarks.quality.benchmark import CHOSEN
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
