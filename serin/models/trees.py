"""XGBoost beside the networks: the same columns, `num` first and then `cat`, whose codes are categories.

XGBoost is an optional extra, so it is imported where it is used, and its absence is reported. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from serin.errors import ExtraMissing
from serin.formats.shards import Array

LARGEST_SET_COLUMN = 30  # codes

Booster = Any  # xgboost.Booster: the package has no types and may be absent


def load_xgboost() -> Any:
    """Returns the package, or raises ExtraMissing."""
    try:
        import xgboost
    except ImportError as error:
        raise ExtraMissing(package="xgboost", extra="xgboost") from error
    return xgboost


def column_types(numeric: int, sizes: Sequence[int]) -> list[str]:
    """Returns XGBoost's names of the column types, in the order of `joined`: `c` is split by sets of codes, `float` by
    order.

    Larger columns are split by order, which is by frequency: trees do about as well, and no runtime has to search for a
    code in a long list.
    """
    return ["float"] * numeric + ["c" if size <= LARGEST_SET_COLUMN else "float" for size in sizes]


def joined(num: Array, cat: Array) -> Array:
    """Returns float32[n, numeric + categorical]."""
    return np.concatenate([np.asarray(num, np.float32), np.asarray(cat, np.float32)], axis=1)


def read_booster(data: bytes, *, threads: int | None = None) -> Booster:
    settings = {} if threads is None else {"nthread": threads}
    return load_xgboost().Booster(settings, model_file=bytearray(data))


def feature_table(num: Array, cat: Array, sizes: Sequence[int]) -> Any:
    """Returns the rows as XGBoost's DMatrix."""
    return load_xgboost().DMatrix(
        joined(num, cat), feature_types=column_types(num.shape[1], sizes), enable_categorical=True
    )


def margins(booster: Booster, num: Array, cat: Array, sizes: Sequence[int]) -> Array:
    """Returns margins, float32[n, outputs]: a sigmoid or softmax gives probabilities; a regression's value is final."""
    found = np.asarray(booster.predict(feature_table(num, cat, sizes), output_margin=True), np.float32)
    return found.reshape(len(num), -1)


def scores(margin: Array, task: str) -> Array:
    """Returns the served model's answers for margins: a probability, one per class, or the value."""
    if task == "regression":
        return margin
    wide = margin.astype(np.float64)
    if task == "binary":
        return np.asarray(1.0 / (1.0 + np.exp(-wide)), np.float32)
    raised = np.exp(wide - wide.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True), np.float32)
