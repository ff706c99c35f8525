"""Makes datasets out of the train and valid rows of one: folds for cross-validation, and all of these rows to train on.

A fold is an ordinary dataset folder, so that every kind of model trains on it as on any other. Test rows are never
read. Does not import torch.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from serin.formats.dataset import FEATURES, DatasetDescription, SplitDescription, write_dataset
from serin.formats.schema import Task
from serin.formats.shards import Array, Rows, count_parts, read_split, seal_part, write_rows

_INDEPENDENT = ("random", "stratified")
_MOST_BYTES = 2**28  # of all folds together


def may_fold(dataset: str, data: DatasetDescription) -> bool:
    """Returns whether rows may change places between train and valid without leaking answers from one to the other.

    Not when the split follows time or groups, nor when a feature was made from the targets of the train rows.
    """
    features = Path(dataset) / FEATURES
    encoded = features.is_file() and '"target_encode"' in features.read_text(encoding="utf-8")
    return data.split_kind in _INDEPENDENT and not encoded


def fits(data: DatasetDescription, folds: int) -> bool:
    """Returns whether copies of the rows for all folds are small, and each class or value may be in each fold."""
    rows = data.rows["train"] + data.rows["valid"]
    width = len(data.numeric) + len(data.categorical) + len(data.targets) + 3
    return rows * width * 4 * folds <= _MOST_BYTES and rows >= 10 * folds


def pooled(dataset: str) -> Rows:
    """Returns the train rows followed by the valid rows."""
    parts = [read_split(dataset, split).whole() for split in ("train", "valid")]
    return Rows(
        num=np.concatenate([part.num for part in parts]),
        cat=np.concatenate([part.cat for part in parts]),
        target=np.concatenate([part.target for part in parts]),
        rows=np.concatenate([part.rows for part in parts]),
    )


def fold_numbers(target: Array, task: Task, folds: int, seed: int) -> Array:
    """Returns the fold of each row, int[n]: sizes differ by one at most, and classes have equal shares in each."""
    order = np.random.default_rng(seed).permutation(len(target))
    if target.ndim == 1:  # also a regression's values: each fold has small and large ones
        order = order[np.argsort(target[order], kind="stable")]
    if task == "regression":  # neighbours in value are dealt to the folds in a random order
        random = np.random.default_rng(seed + 1)
        blocks = [random.permutation(folds) for _ in range(-(-len(target) // folds))]
        dealt = np.concatenate(blocks)[: len(target)]
    else:
        dealt = np.arange(len(target)) % folds
    found = np.empty(len(target), np.int64)
    found[order] = dealt
    return found


def write_fold(folder: Path, data: DatasetDescription, rows: Rows, held_out: Array | None) -> None:
    """Writes a dataset whose valid rows are those in the mask `held_out`, and whose train rows are the others. None:
    all rows are train rows. What an interrupted attempt left is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    chosen = {"train": np.arange(len(rows))}
    if held_out is not None:
        chosen = {"train": np.flatnonzero(~held_out), "valid": np.flatnonzero(held_out)}
    names = [column.name for column in data.categorical]
    for split, at in chosen.items():
        part = Rows(num=rows.num[at], cat=rows.cat[at], target=rows.target[at], rows=rows.rows[at])
        write_rows(folder / split, 0, part)
        for index in range(count_parts(len(at))):
            seal_part(folder / split, index, len(at), data.numeric, names)
    splits = {name: SplitDescription(rows=len(at), parts=count_parts(len(at))) for name, at in chosen.items()}
    write_dataset(folder, replace(data, splits=splits))
