"""XGBoost beside the networks: the same columns, `num` first and then `cat`, whose codes are categories.

XGBoost is an optional extra, so it is imported where it is used, and its absence is reported. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serin.errors import ExtraMissing
from serin.formats.shards import Array
from serin.formats.trained import read_trained

LARGEST_SET_COLUMN = 30  # codes

Booster = Any  # xgboost.Booster: the package has no types and may be absent
Margins = Callable[[Array, Array], Array]
"""Maps num float32[n, k] and cat int[n, m] to float32[n, outputs]."""


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


def read_booster(data: bytes) -> Booster:
    return load_xgboost().Booster(model_file=bytearray(data))


def in_units(booster: Booster, unit: float) -> Booster:
    """Returns a regression's trees with every answer multiplied by `unit`, a power of two, so nothing is rounded."""
    if unit == 1.0:
        return booster
    document = json.loads(bytes(booster.save_raw("json")))
    learner = document["learner"]
    base = base_scores(learner).astype(np.float64) * unit
    learner["learner_model_param"]["base_score"] = json.dumps(base.tolist())
    for tree in learner["gradient_booster"]["model"]["trees"]:
        tree["base_weights"] = [value * unit for value in tree["base_weights"]]
        tree["loss_changes"] = [value * unit * unit for value in tree["loss_changes"]]
        splits, leaf = tree["split_conditions"], [child == -1 for child in tree["left_children"]]
        tree["split_conditions"] = [v * unit if last else v for v, last in zip(splits, leaf, strict=True)]
    return read_booster(json.dumps(document).encode())


def feature_table(num: Array, cat: Array, sizes: Sequence[int]) -> Any:
    """Returns the rows as XGBoost's DMatrix."""
    return load_xgboost().DMatrix(
        joined(num, cat), feature_types=column_types(num.shape[1], sizes), enable_categorical=True
    )


def margins(booster: Booster, num: Array, cat: Array, sizes: Sequence[int]) -> Array:
    """Returns margins, float32[n, outputs]: a sigmoid or softmax gives probabilities; a regression's value is final.

    A regression's base score is added last, in float64: XGBoost begins its float32 sum with it, and so rounds every
    leaf to the places that a large base leaves.
    """
    table, learner = feature_table(num, cat, sizes), json.loads(booster.save_config())["learner"]
    base = np.zeros(1)
    if learner["objective"]["name"].startswith("reg:"):
        base = base_scores(learner).astype(np.float64)
        table.set_base_margin(np.zeros((len(num), len(base)), np.float32))
    found = np.asarray(booster.predict(table, output_margin=True), np.float32)
    return np.asarray(found.reshape(len(num), -1) + base, np.float32)


def base_scores(learner: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the base scores in XGBoost's JSON of a learner, as it writes them: one, or one for each output."""
    written = learner["learner_model_param"]["base_score"]
    return np.atleast_1d(np.asarray(json.loads(written) if isinstance(written, str) else written, np.float32))


def scores(margin: Array, task: str) -> Array:
    """Returns the served model's answers for margins: a probability, one per class, or the value."""
    if task == "regression":
        return margin
    wide = margin.astype(np.float64)
    if task == "binary":
        return np.asarray(1.0 / (1.0 + np.exp(-wide)), np.float32)
    raised = np.exp(wide - wide.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True), np.float32)


def tree_margins(folder: Path) -> Margins:
    """Returns the trees of a result folder, on the CPU."""
    record, data = read_trained(folder)
    assert record.shape is not None  # of trees it is always known
    booster, sizes = read_booster(data), record.shape.sizes
    return lambda num, cat: margins(booster, num, cat, sizes)
