"""TreeSHAP by XGBoost itself: exact Shapley values of every feature, by the rows that each branch saw in training.

This is what `shap.TreeExplainer` calls `tree_path_dependent`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serin.export.explain.explanation import Parts
from serin.formats.wire import Array
from serin.models.trees import Booster, feature_table


def tree_shap(booster: Booster, num: Array, cat: Array, sizes: Sequence[int]) -> Parts:
    """The parts of each row's margin; the base value is the mean margin of the training rows."""
    table = feature_table(num, cat, sizes)
    found = np.asarray(booster.predict(table, pred_contribs=True, strict_shape=True), np.float64)
    margin = np.asarray(booster.predict(table, output_margin=True), np.float64)
    return Parts(features=found[:, :, :-1], base=found[:, :, -1], margin=margin.reshape(len(num), -1))
