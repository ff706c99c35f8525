"""Shapley values of trees by their definition: every subset of features, no algorithm of XGBoost's or shap's."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def shapley_values(trees: Mapping[str, Any], row: np.ndarray, outputs: int) -> np.ndarray:
    """float64[outputs, features]; a feature outside a subset is averaged over the training rows of each branch."""
    model = trees["learner"]["gradient_booster"]["model"]
    features = len(row)
    expected = {
        subset: _margins(model, row, frozenset(subset), outputs)
        for size in range(features + 1)
        for subset in itertools.combinations(range(features), size)
    }
    found = np.zeros((outputs, features))
    for subset, without in expected.items():
        weight = 1 / (features * math.comb(features - 1, len(subset))) if len(subset) < features else 0.0
        for feature in set(range(features)) - set(subset):
            found[:, feature] += weight * (expected[tuple(sorted((*subset, feature)))] - without)
    return found


def _margins(model: Mapping[str, Any], row: np.ndarray, known: frozenset[int], outputs: int) -> np.ndarray:
    found = np.zeros(outputs)
    for tree, output in zip(model["trees"], model["tree_info"], strict=True):
        found[output] += _expected(tree, 0, row, known)
    return found


def _expected(tree: Mapping[str, Any], node: int, row: np.ndarray, known: frozenset[int]) -> float:
    left, right = tree["left_children"][node], tree["right_children"][node]
    if left == -1:
        return float(tree["split_conditions"][node])
    feature = tree["split_indices"][node]
    if feature in known:
        return _expected(tree, left if _goes_left(tree, node, row[feature]) else right, row, known)
    share = tree["sum_hessian"][left] / tree["sum_hessian"][node]
    return share * _expected(tree, left, row, known) + (1 - share) * _expected(tree, right, row, known)


def _goes_left(tree: Mapping[str, Any], node: int, value: float) -> bool:
    if node not in tree["categories_nodes"]:
        return bool(np.float32(value) < np.float32(tree["split_conditions"][node]))
    place = tree["categories_nodes"].index(node)
    start, size = tree["categories_segments"][place], tree["categories_sizes"][place]
    return int(value) not in tree["categories"][start : start + size]
