"""Feeds shards to XGBoost: an iterator over the mapped parts, on the GPU where the trees are grown on one.

The numbers go from the files' pages to XGBoost's compact form a part at a time, as numpy arrays or, on a GPU, as cupy
arrays that are joined there. There is no data frame and no float32 copy of the whole split. Does not import torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from serin.formats.dataset import DatasetDescription
from serin.formats.shards import Array, SplitArrays, read_split
from serin.models.trees import Booster, column_types, joined, load_xgboost
from serin.training.data.class_weights import class_weights
from serin.training.launch.job import TrainingJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rows of one worker: the `index`-th of `count` equal stretches of a split."""

    index: int = 0
    count: int = 1

    def of(self, rows: int) -> tuple[int, int]:
        """Returns the first row and the one after the last."""
        return rows * self.index // self.count, rows * (self.index + 1) // self.count


ALL = Share()
ONE = np.float32(1.0)
_SMALL = 0.1
_IN_THE_TARGETS_UNIT = ("gamma", "alpha", "max_delta_step")


def target_unit(job: TrainingJob, data: DatasetDescription) -> np.float32:
    """Returns a power of two near the standard deviation of a regression's target where that is small, else 1.

    XGBoost makes no split that gains less than 1e-6, in the square of the target's unit: of a target that varies by
    1e-4 it learns nothing. Options that count in that unit leave it as it is.
    """
    if data.task != "regression" or any(job.model.options.get(name) for name in _IN_THE_TARGETS_UNIT):
        return ONE
    deviation = np.concatenate(read_split(job.dataset, "train").target).std(axis=0, dtype=np.float64)
    smallest = np.min(deviation, initial=np.inf, where=deviation > 0)
    return np.float32(2.0 ** np.floor(np.log2(smallest))) if smallest < _SMALL else ONE


def quantile_matrix(
    job: TrainingJob,
    data: DatasetDescription,
    split: str,
    *,
    like: Any = None,
    device: str = "cpu",
    bins: int = 256,
    share: Share = ALL,
    unit: np.float32 = ONE,
) -> Any:
    """Returns a split, or a worker's share of it, in XGBoost's compact form. `like`: the training rows' matrix, whose
    bins a valid split uses. `unit`: of the target in it."""
    xgboost: Any = load_xgboost()
    arrays = read_split(job.dataset, split)
    weights = _class_weights(job, data, arrays) if split == "train" else None
    types = column_types(len(data.numeric), sizes_of(data))
    features = features_on(device)

    class Parts(xgboost.DataIter):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts: Iterator[tuple[Array, Array, Array]] = iter(())

        def reset(self) -> None:
            self.parts = shared_parts(arrays, share)

        def next(self, input_data: Callable[..., Any]) -> bool:
            part = next(self.parts, None)
            if part is None:
                return False
            num, cat, target = part
            each = None if weights is None else weights[np.asarray(target, np.int64)]
            label = np.asarray(target) / unit
            input_data(data=features(num, cat), label=label, weight=each, feature_types=types)
            return True

    with using(device):
        return xgboost.QuantileDMatrix(Parts(), ref=like, max_bin=bins, enable_categorical=True)


def shared_parts(arrays: SplitArrays, share: Share) -> Iterator[tuple[Array, Array, Array]]:
    """Yields num, cat and target of every part that has rows of the share, cut to them."""
    begin, end = share.of(len(arrays))
    at = 0
    for num, cat, target in zip(arrays.num, arrays.cat, arrays.target, strict=True):
        rows = slice(max(begin - at, 0), min(end - at, len(target)))
        at += len(target)
        if rows.start < rows.stop:
            yield num[rows], cat[rows], target[rows]


def features_on(device: str) -> Callable[[Array, Array], Any]:
    """Returns the function that joins num and cat to float32[n, columns] in the memory where trees are grown. Without
    cupy XGBoost copies from the host itself."""
    if not _has_cupy(device):
        return joined
    import cupy

    def on_gpu(num: Array, cat: Array) -> Any:
        sent = [cupy.asarray(np.ascontiguousarray(part)) for part in (num, cat) if part.shape[1]]
        return cupy.concatenate([part.astype(cupy.float32, copy=False) for part in sent], axis=1)

    return on_gpu


def using(device: str) -> AbstractContextManager[Any]:
    """Makes cupy use the GPU of `device` ("cuda" or "cuda:1") inside the block."""
    if not _has_cupy(device):
        return nullcontext()
    import cupy

    chosen: AbstractContextManager[Any] = cupy.cuda.Device(int(device.partition(":")[2] or 0))
    return chosen


def _has_cupy(device: str) -> bool:
    return device != "cpu" and importlib.util.find_spec("cupy") is not None


def margins_on(device: str, booster: Booster, num: Array, cat: Array, sizes: list[int]) -> Array:
    """Returns margins, float32[n, outputs], computed on the device."""
    types = column_types(num.shape[1], sizes)
    booster.set_param({"device": device})
    with using(device):
        table = load_xgboost().DMatrix(
            features_on(device)(num, cat), feature_types=types, enable_categorical=True
        )
        found = np.asarray(booster.predict(table, output_margin=True), np.float32)
    return found.reshape(len(num), -1)


def sizes_of(data: DatasetDescription) -> list[int]:
    return [column.size for column in data.categorical]


def _class_weights(job: TrainingJob, data: DatasetDescription, arrays: SplitArrays) -> Array | None:
    if data.task == "regression":
        return None
    classes = 2 if data.task == "binary" else len(data.classes or ())
    weights = class_weights(job.training.class_weights, arrays.target, classes)
    return None if weights is None else np.asarray(weights, np.float32)
