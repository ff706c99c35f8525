"""XGBoost on the same features: a small grid, each with early stopping on the valid rows; the best there is scored."""

from __future__ import annotations

import itertools
from typing import Any

import xgboost

from benchmarks.quality.rows import categorical_columns, read_rows

GRID = {"max_depth": (6, 9), "eta": (0.1,), "min_child_weight": (20,)}


def run(request: dict[str, Any]) -> dict[str, Any]:
    codes = set(categorical_columns(request["dataset"]))
    data = {}
    for split in ("train", "valid", "test"):
        rows, target = read_rows(request["dataset"], split)
        kinds = ["c" if column in codes else "float" for column in range(rows.shape[1])]
        data[split] = xgboost.DMatrix(rows, target, feature_types=kinds, enable_categorical=True)
    found = []
    for values in itertools.product(*GRID.values()):
        settings = dict(zip(GRID, values, strict=True))
        booster = xgboost.train(
            {
                **settings, "objective": "binary:logistic", "eval_metric": "auc", "tree_method": "hist",
                "nthread": request["threads"], "seed": 1, "subsample": 0.8, "colsample_bytree": 0.8,
            },
            data["train"], num_boost_round=request["rounds"], evals=[(data["valid"], "valid")],
            early_stopping_rounds=20, verbose_eval=False,
        )  # fmt: skip
        found.append((booster.best_score, settings, booster))
    valid_auc, settings, booster = max(found, key=lambda item: item[0])
    scores = booster.predict(data["test"], iteration_range=(0, booster.best_iteration + 1))
    return {"valid_auc": valid_auc, "settings": settings, "scores": [float(score) for score in scores]}
