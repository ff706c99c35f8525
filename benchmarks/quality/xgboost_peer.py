"""XGBoost on the same features, stopped early by the valid rows."""

from __future__ import annotations

from typing import Any

import xgboost

from benchmarks.quality.rows import categorical_columns, read_rows

ROUNDS = 1000
PATIENCE = 20


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Trains with XGBoost's own `settings`; with `test` it also scores the test rows."""
    splits = ("train", "valid", "test") if request["test"] else ("train", "valid")
    data = {split: _matrix(request["dataset"], split) for split in splits}
    booster = xgboost.train(
        {
            **request["settings"], "objective": "binary:logistic", "eval_metric": "auc", "tree_method": "hist",
            "nthread": request["threads"], "seed": request["seed"],
        },
        data["train"], num_boost_round=ROUNDS, evals=[(data["valid"], "valid")],
        early_stopping_rounds=PATIENCE, verbose_eval=False,
    )  # fmt: skip
    answer: dict[str, Any] = {"valid_auc": booster.best_score, "rounds": booster.best_iteration + 1}
    if request["test"]:
        scores = booster.predict(data["test"], iteration_range=(0, booster.best_iteration + 1))
        answer["scores"] = [float(score) for score in scores]
    return answer


def _matrix(dataset: str, split: str) -> xgboost.DMatrix:
    codes = set(categorical_columns(dataset))
    rows, target = read_rows(dataset, split)
    kinds = ["c" if column in codes else "float" for column in range(rows.shape[1])]
    return xgboost.DMatrix(rows, target, feature_types=kinds, enable_categorical=True)
