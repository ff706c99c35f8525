"""The search space of each contender: the settings that its own documentation names first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import optuna

from benchmarks.race import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    role: Role
    module: str
    fixed: dict[str, Any]
    uniform: dict[str, tuple[float, float]]
    log: dict[str, tuple[float, float]]
    whole: dict[str, tuple[int, int]]  # on a log scale
    choice: dict[str, tuple[str, ...]]  # as JSON

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        found: dict[str, Any] = dict(self.fixed)
        found |= {name: trial.suggest_float(name, *ends) for name, ends in self.uniform.items()}
        found |= {name: trial.suggest_float(name, *ends, log=True) for name, ends in self.log.items()}
        found |= {name: trial.suggest_int(name, *ends, log=True) for name, ends in self.whole.items()}
        for name, values in self.choice.items():
            found[name] = json.loads(trial.suggest_categorical(name, values))
        return found


CONTENDERS: dict[str, Contender] = {
    "ours": Contender(
        role="ours",
        module="benchmarks.quality.ours",
        fixed={"model.kind": "mlp", "training.epochs": 3},
        uniform={"model.dropout": (0.0, 0.5)},
        log={"training.learning_rate": (1e-3, 2e-2), "training.weight_decay": (1e-3, 1.0)},
        whole={"model.embedding": (2, 16)},
        choice={
            "model.hidden": ("[64, 32]", "[128, 64]", "[256, 128]"),
            "training.batch_rows": ("1024", "4096"),
        },
    ),
    "xgboost": Contender(
        role="peer",
        module="benchmarks.quality.xgboost_peer",
        fixed={},
        uniform={"subsample": (0.5, 1.0), "colsample_bytree": (0.3, 1.0)},
        log={"eta": (0.03, 0.3), "min_child_weight": (1.0, 200.0)},
        whole={"max_depth": (3, 10)},
        choice={},
    ),
    "lightgbm": Contender(
        role="peer",
        module="benchmarks.quality.lightgbm_peer",
        fixed={},
        uniform={"bagging_fraction": (0.5, 1.0), "feature_fraction": (0.3, 1.0)},
        log={"learning_rate": (0.03, 0.3)},
        whole={"num_leaves": (8, 255), "min_data_in_leaf": (10, 500)},
        choice={},
    ),
}
