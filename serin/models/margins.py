"""Opens a trained model as a function from features to margins: logits, or a regression's values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from serin.formats.shards import Array
from serin.formats.trained import TREES, read_record, read_trained
from serin.models.build import load_model
from serin.models.trees import margins, read_booster

Margins = Callable[[Array, Array], Array]
"""Maps num float32[n, k] and cat int[n, m] to float32[n, outputs]."""

_BATCH_ROWS = 16_384


def open_margins(folder: Path) -> Margins:
    """Returns the trees or the network of a result folder, on the CPU."""
    return _of_trees(folder) if read_record(folder).file == TREES else _of_network(folder)


def _of_trees(folder: Path) -> Margins:
    record, data = read_trained(folder)
    assert record.shape is not None  # of trees it is always known
    booster, sizes = read_booster(data), record.shape.sizes
    return lambda num, cat: margins(booster, num, cat, sizes)


def _of_network(folder: Path) -> Margins:
    network = load_model(folder)

    def ask(num: Array, cat: Array) -> Array:
        found = []
        with torch.inference_mode():
            for at in range(0, len(num), _BATCH_ROWS):
                rows = slice(at, at + _BATCH_ROWS)
                numbers = torch.from_numpy(np.array(num[rows], np.float32))
                codes = torch.from_numpy(np.array(cat[rows], np.int64))
                found.append(network(numbers, codes).numpy())
        return np.concatenate(found)

    return ask
