"""The peers of the quality benchmark: each package trained as its documentation shows, stopped early on valid rows.

`LEARNERS[name](settings, data) -> predict`. `SPACES[name]` draws settings; the package's defaults come first. Packages
are imported where they are used: one that is absent is reported and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from serin.formats.schema import Task

ROUNDS = 1000
PATIENCE = 50
Predict = Callable[[np.ndarray], np.ndarray]
"""Rows float32[n, columns] -> probability of 1, probabilities of classes, or value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    train: np.ndarray
    train_target: np.ndarray
    valid: np.ndarray
    valid_target: np.ndarray
    codes: list[int]  # the columns that are categories
    task: Task
    seed: int
    threads: int
    budget: float  # seconds for all settings together

    @property
    def classes(self) -> int:
        return int(max(self.train_target.max(), self.valid_target.max())) + 1


def xgboost(settings: dict[str, Any], data: Data) -> Predict:
    import xgboost as package

    kinds = ["c" if column in data.codes else "float" for column in range(data.train.shape[1])]
    objective, metric = {
        "binary": ("binary:logistic", "auc"), "multiclass": ("multi:softprob", "mlogloss"),
        "regression": ("reg:squarederror", "rmse"),
    }[data.task]  # fmt: skip
    common = {"feature_types": kinds, "enable_categorical": True}
    train = package.DMatrix(data.train, data.train_target, **common)
    valid = package.DMatrix(data.valid, data.valid_target, **common)
    fixed = {"objective": objective, "eval_metric": metric, "nthread": data.threads, "seed": data.seed}
    several = {"num_class": data.classes} if data.task == "multiclass" else {}
    booster = package.train(
        {"eta": 0.1, **settings, **fixed, **several}, train, num_boost_round=ROUNDS, evals=[(valid, "valid")],
        early_stopping_rounds=PATIENCE, verbose_eval=False,
    )  # fmt: skip
    best = (0, booster.best_iteration + 1)
    return lambda rows: booster.predict(package.DMatrix(rows, **common), iteration_range=best)


def lightgbm(settings: dict[str, Any], data: Data) -> Predict:
    import lightgbm as package

    objective, metric = {
        "binary": ("binary", "auc"), "multiclass": ("multiclass", "multi_logloss"), "regression": ("l2", "rmse"),
    }[data.task]  # fmt: skip
    several = {"num_class": data.classes} if data.task == "multiclass" else {}
    fixed = {"num_threads": data.threads, "seed": data.seed, "verbosity": -1, "bagging_freq": 1}
    train = package.Dataset(data.train, data.train_target, categorical_feature=data.codes)
    booster = package.train(
        {**settings, "objective": objective, "metric": metric, **fixed, **several}, train,
        num_boost_round=ROUNDS, valid_sets=[package.Dataset(data.valid, data.valid_target, reference=train)],
        callbacks=[package.early_stopping(PATIENCE, verbose=False)],
    )  # fmt: skip
    return lambda rows: np.asarray(booster.predict(rows, num_iteration=booster.best_iteration))


def catboost(settings: dict[str, Any], data: Data) -> Predict:
    import catboost as package
    import pandas as pd

    def table(rows: np.ndarray) -> pd.DataFrame:
        made = pd.DataFrame(rows)
        return made.astype(dict.fromkeys(data.codes, "int64"))

    kind = package.CatBoostRegressor if data.task == "regression" else package.CatBoostClassifier
    model = kind(
        iterations=ROUNDS, random_seed=data.seed, thread_count=data.threads, allow_writing_files=False,
        verbose=False, cat_features=data.codes, early_stopping_rounds=PATIENCE, **settings,
        **({"eval_metric": "AUC"} if data.task == "binary" else {}),
    )  # fmt: skip
    model.fit(table(data.train), data.train_target, eval_set=(table(data.valid), data.valid_target))
    if data.task == "regression":
        return lambda rows: np.asarray(model.predict(table(rows)))
    return lambda rows: _chances(model.predict_proba(table(rows)))


def scikit(settings: dict[str, Any], data: Data) -> Predict:
    from sklearn import ensemble

    regression = data.task == "regression"
    kind = ensemble.HistGradientBoostingRegressor if regression else ensemble.HistGradientBoostingClassifier
    few = [column for column in data.codes if data.train[:, column].max() < 255]  # it takes no more codes
    model = kind(
        max_iter=ROUNDS, early_stopping=True, n_iter_no_change=PATIENCE, random_state=data.seed,
        categorical_features=few or None, **settings,
    )  # fmt: skip
    model.fit(data.train, data.train_target, X_val=data.valid, y_val=data.valid_target)
    if regression:
        return lambda rows: np.asarray(model.predict(rows))
    return lambda rows: _chances(model.predict_proba(rows))


_ROWS_PER_S = 30_000  # of a network of this size, about, on each of two cores


def _epochs(data: Data, most: int) -> int:
    """Returns how many epochs a network may have, so that one training ends within the budget."""
    return max(2, min(most, int(0.7 * data.budget * _ROWS_PER_S * data.threads / len(data.train))))


def realmlp(settings: dict[str, Any], data: Data) -> Predict:
    from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor

    kind = RealMLP_TD_Regressor if data.task == "regression" else RealMLP_TD_Classifier
    settings = {**settings, "n_epochs": _epochs(data, settings.get("n_epochs", 256))}
    names = [column in data.codes for column in range(data.train.shape[1])]
    model = kind(random_state=data.seed, n_threads=data.threads, device="cpu", verbosity=0, **settings)
    model.fit(data.train, data.train_target, data.valid, data.valid_target, cat_indicator=names)
    if data.task == "regression":
        return lambda rows: np.asarray(model.predict(rows))
    return lambda rows: _chances(model.predict_proba(rows))


def _chances(found: np.ndarray) -> np.ndarray:
    return found[:, 1] if found.shape[1] == 2 else found


def tabm(settings: dict[str, Any], data: Data) -> Predict:
    from benchmarks.quality.tabm_peer import tabm as learn

    return learn(settings, data)


Draw = Callable[[np.random.Generator], dict[str, Any]]
LEARNERS: dict[str, Callable[[dict[str, Any], Data], Predict]] = {
    "xgboost": xgboost, "lightgbm": lightgbm, "catboost": catboost, "scikit-learn": scikit, "realmlp": realmlp,
    "tabm": tabm,
}  # fmt: skip
TREES = ("xgboost", "lightgbm", "catboost", "scikit-learn")
NETWORKS = ("realmlp", "tabm")


def _log(random: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(random.uniform(np.log(low), np.log(high))))


SPACES: dict[str, Draw] = {
    "xgboost": lambda random: {
        "eta": _log(random, 0.03, 0.3), "max_depth": int(random.integers(3, 11)),
        "min_child_weight": _log(random, 1, 100), "subsample": random.uniform(0.5, 1),
        "colsample_bytree": random.uniform(0.3, 1),
    },
    "lightgbm": lambda random: {
        "learning_rate": _log(random, 0.03, 0.3), "num_leaves": int(_log(random, 8, 255)),
        "min_data_in_leaf": int(_log(random, 5, 300)), "bagging_fraction": random.uniform(0.5, 1),
        "feature_fraction": random.uniform(0.3, 1),
    },
    "catboost": lambda random: {
        "learning_rate": _log(random, 0.03, 0.3), "depth": int(random.integers(4, 9)),
        "l2_leaf_reg": _log(random, 1, 10),
    },
    "scikit-learn": lambda random: {
        "learning_rate": _log(random, 0.03, 0.3), "max_leaf_nodes": int(_log(random, 8, 255)),
        "min_samples_leaf": int(_log(random, 5, 300)), "l2_regularization": _log(random, 0.001, 10),
    },
    "realmlp": lambda random: {
        "lr": _log(random, 0.02, 0.2), "p_drop": random.uniform(0, 0.3), "n_epochs": 64,
    },
    "tabm": lambda random: {
        "lr": _log(random, 3e-4, 5e-3), "dropout": random.uniform(0, 0.3), "bins": int(random.integers(8, 64)),
    },
}  # fmt: skip
