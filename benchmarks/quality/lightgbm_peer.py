"""LightGBM on the same features: a small grid, each with early stopping on the valid rows; the best there is scored."""

from __future__ import annotations

import itertools
from typing import Any

import lightgbm

from benchmarks.quality.rows import categorical_columns, read_rows

GRID = {"num_leaves": (31, 127), "learning_rate": (0.1,), "min_data_in_leaf": (20,)}


def run(request: dict[str, Any]) -> dict[str, Any]:
    splits = {split: read_rows(request["dataset"], split) for split in ("train", "valid", "test")}
    codes = categorical_columns(request["dataset"])
    found = []
    for values in itertools.product(*GRID.values()):
        settings = dict(zip(GRID, values, strict=True))
        train = lightgbm.Dataset(*splits["train"], categorical_feature=codes)
        booster = lightgbm.train(
            {
                **settings, "objective": "binary", "metric": "auc", "num_threads": request["threads"], "seed": 1,
                "verbosity": -1, "bagging_fraction": 0.8, "bagging_freq": 1, "feature_fraction": 0.8,
            },
            train, num_boost_round=request["rounds"], valid_sets=[lightgbm.Dataset(*splits["valid"], reference=train)],
            callbacks=[lightgbm.early_stopping(20, verbose=False)],
        )  # fmt: skip
        found.append((booster.best_score["valid_0"]["auc"], settings, booster))
    valid_auc, settings, booster = max(found, key=lambda item: item[0])
    scores = booster.predict(splits["test"][0], num_iteration=booster.best_iteration)
    return {"valid_auc": valid_auc, "settings": settings, "scores": [float(score) for score in scores]}
