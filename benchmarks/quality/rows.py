"""Reads the features of a dataset as plain arrays, the same for every contender. Needs only numpy."""

from __future__ import annotations

import numpy as np

from serin.formats.shards import read_split

Split = tuple[np.ndarray, np.ndarray]


def read_rows(dataset: str, split: str) -> Split:
    """Returns float32[n, numeric + categorical] with codes as integers, and the target."""
    rows = read_split(dataset, split).whole()
    return np.concatenate([rows.num, rows.cat.astype(np.float32)], axis=1), np.asarray(rows.target)


def categorical_columns(dataset: str) -> list[int]:
    rows = read_split(dataset, "valid")
    return list(range(rows.num[0].shape[1], rows.num[0].shape[1] + rows.cat[0].shape[1]))
