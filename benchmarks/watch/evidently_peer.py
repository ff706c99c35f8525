"""Evidently on windows of rows: the drift score of each column at its defaults, and missing values.

Runs in the peers' environment. The scores are computed by the tests that its drift preset chooses, without the preset's
charts, which take seconds per window. Times are left out: it does not look for drift in them.
"""

from __future__ import annotations

import warnings
from typing import Any

import pandas as pd

_reference: dict[str, Any] = {}


def prepare(request: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore")
    rows = pd.read_parquet(request["reference"])
    _reference.update(rows=rows, missing=rows.isna().mean().to_dict())


def run(request: dict[str, Any]) -> dict[str, Any]:
    """For each window of `rows`: per column the score, its threshold, and the share of missing values."""
    found = []
    rows = pd.read_parquet(request["rows"])
    for window, own in rows.groupby("window"):
        kinds = dict.fromkeys(request["numbers"], "num") | dict.fromkeys(request["categories"], "cat")
        drift = {name: _score(own[name], _reference["rows"][name], kind) for name, kind in kinds.items()}
        missing = {name: [float(own[name].isna().mean()), _reference["missing"][name]] for name in kinds}
        found.append({"window": int(window), "rows": len(own), "drift": drift, "missing": missing})
    return {"windows": found}


def _score(current: pd.Series, reference: pd.Series, kind: str) -> list[float]:
    """How different the column is, by the distance that Evidently chooses for so many rows, and its threshold."""
    from evidently.legacy.calculations.stattests.registry import get_stattest
    from evidently.legacy.core import ColumnType

    column = ColumnType.Numerical if kind == "num" else ColumnType.Categorical
    before, now = reference.dropna(), current.dropna()
    test = get_stattest(before, now, column, None)
    result = test(before, now, column, None)
    return [float(result.drift_score), float(result.actual_threshold)]
