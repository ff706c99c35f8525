"""A trained network that explains itself by integrated gradients. The only file here that needs torch at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from serin.errors import NetworkUnfit
from serin.formats.explain import ExplainRecord
from serin.formats.wire import Array
from serin.models.build import load_model
from serin.models.foreign.module import ANY_FAULT
from serin.scoring.explain.explanation import TrainedModel, Unexplained
from serin.scoring.explain.integrated_gradients import integrated_gradients


def open_network(folder: Path, record: ExplainRecord) -> TrainedModel:
    """The network in a bundle's folder `explain`."""
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
