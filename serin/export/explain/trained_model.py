"""The trained model that a bundle keeps for explanations, with the method that fits its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from serin.errors import NetworkUnfit
from serin.export.explain.explanation import Method, Parts, Unexplained
from serin.export.explain.integrated_gradients import integrated_gradients
from serin.export.explain.tree_shap import tree_shap
from serin.formats.explain import ExplainRecord
from serin.formats.trained import TREES, read_record, read_trained
from serin.formats.wire import Array
from serin.models.build import load_model
from serin.models.foreign.module import ANY_FAULT
from serin.models.trees import margins, read_booster


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """`margins`: num float32[n, k] and cat int64[n, m] to logits or values, [n, outputs]; `explain`: their parts."""

    method: Method
    margins: Callable[[Array, Array], Array]
    explain: Callable[[Array, Array], Parts]


def open_trained(folder: Path, record: ExplainRecord) -> TrainedModel:
    """The model in a bundle's folder `explain`."""
    return _trees(folder) if read_record(folder).file == TREES else _network(folder, record)


def _trees(folder: Path) -> TrainedModel:
    record, data = read_trained(folder)
    assert record.shape is not None  # of trees it is always known
    booster, sizes = read_booster(data), record.shape.sizes
    return TrainedModel(
        method="TreeSHAP",
        margins=lambda num, cat: margins(booster, num, cat, sizes),
        explain=lambda num, cat: tree_shap(booster, num, cat, sizes),
    )


def _network(folder: Path, record: ExplainRecord) -> TrainedModel:
    try:
        network = load_model(folder).double().requires_grad_(False)
    except NetworkUnfit as error:
        raise Unexplained(str(error)) from error
    baseline_num, baseline_cat = np.asarray(record.baseline_num), np.asarray(record.baseline_cat)

    def ask(num: Array, cat: Array) -> Array:
        with torch.inference_mode():
            answer: Array = network(torch.from_numpy(num).double(), torch.from_numpy(cat)).numpy()
        return answer.astype(np.float32)

    try:
        ask(np.asarray(baseline_num[None], np.float32), baseline_cat.astype(np.int64)[None])
    except ANY_FAULT as error:
        raise Unexplained(f"its network does not run in float64: {error}") from error
    return TrainedModel(
        method="integrated gradients",
        margins=ask,
        explain=lambda num, cat: integrated_gradients(network, num, cat, baseline_num, baseline_cat),
    )
