"""What a search makes as large as it can: AUC where there is one, else the loss's fall. Of the valid rows, always."""

from __future__ import annotations

from collections.abc import Mapping

_SIGNS = {"auc": 1.0, "logloss": -1.0, "rmse": -1.0}


def objective(metrics: Mapping[str, float]) -> float | None:
    """Higher is better; None where the valid rows were not measured."""
    name = objective_name(metrics)
    return None if not name else _SIGNS[name.removeprefix("valid_")] * metrics[name]


def objective_name(metrics: Mapping[str, float]) -> str:
    return next((f"valid_{name}" for name in _SIGNS if f"valid_{name}" in metrics), "")
