"""LightGBM on the same features, stopped early by the valid rows."""

from __future__ import annotations

from typing import Any

import lightgbm

from benchmarks.quality.rows import categorical_columns, read_rows

ROUNDS = 1000
PATIENCE = 20


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Trains with LightGBM's own `settings`; with `test` it also scores the test rows."""
    codes = categorical_columns(request["dataset"])
    train = lightgbm.Dataset(*read_rows(request["dataset"], "train"), categorical_feature=codes)
    valid = lightgbm.Dataset(*read_rows(request["dataset"], "valid"), reference=train)
    booster = lightgbm.train(
        {
            **request["settings"], "objective": "binary", "metric": "auc", "num_threads": request["threads"],
            "seed": request["seed"], "verbosity": -1, "bagging_freq": 1,
        },
        train, num_boost_round=ROUNDS, valid_sets=[valid],
        callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)],
    )  # fmt: skip
    answer: dict[str, Any] = {
        "valid_auc": booster.best_score["valid_0"]["auc"], "rounds": booster.best_iteration,
    }  # fmt: skip
    if request["test"]:
        scores = booster.predict(
            read_rows(request["dataset"], "test")[0], num_iteration=booster.best_iteration
        )
        answer["scores"] = [float(score) for score in scores]
    return answer
