"""Puts into a bundle what explanations need: the trained model, the raw column of each feature, the baseline.

A model that is nothing but a graph (from a script, or trained elsewhere) has no trees or weights to keep. Members of a
blend are explained by different methods, whose parts do not belong to one baseline.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from serin.export.convert.features2onnx import FeatureGraph
from serin.formats.explain import FOLDER, ExplainRecord, FeatureColumns, write_explain
from serin.formats.shards import read_split
from serin.formats.trained import BLEND, GRAPH, RECORD, read_trained
from serin.formats.wire import Array

_BASELINE_ROWS = 100_000


def keep_for_explanations(
    work: Path,
    checkpoint: Path,
    dataset: Path,
    columns: FeatureColumns,
    features: FeatureGraph,
    *,
    variant: str,
) -> None:
    """Fills the folder `explain` of the bundle in `work`. The pruned variant is another network than the one it was
    cut from, so it is the one that is kept when it is served."""
    trained = checkpoint / "pruned" if variant == "pruned" else checkpoint
    record, _ = read_trained(trained)
    if record.file in (GRAPH, BLEND):
        return
    folder = work / FOLDER
    folder.mkdir()
    for name in (RECORD, record.file):
        shutil.copyfile(trained / name, folder / name)
    num, cat = _training_rows(dataset)
    write_explain(
        folder,
        ExplainRecord(
            num_tensor=features.num,
            cat_tensor=features.cat,
            columns=columns,
            baseline_num=tuple(_means(num)),
            baseline_cat=tuple(int(np.bincount(codes).argmax()) for codes in cat.T),
        ),
    )


def _training_rows(dataset: Path) -> tuple[Array, Array]:
    """num and cat of training rows from all over the split, the same in every run."""
    split = read_split(dataset, "train")
    step = -(-len(split) // _BASELINE_ROWS)
    num, cat = (np.concatenate([part[::step] for part in parts]) for parts in (split.num, split.cat))
    return num, cat


def _means(num: Array) -> list[float]:
    finite = np.where(np.isfinite(num), num, np.nan).astype(np.float64)
    present = np.count_nonzero(~np.isnan(finite), axis=0)
    sums = np.nansum(finite, axis=0)
    means: list[float] = (sums / np.maximum(present, 1)).tolist()
    return means
