"""The quality of answers: the task's metrics, the loss between two models, and what the watcher compares live rows with
once their labels are known.

That reference also has the block in which live rows may depend on each other: the shortest of a minute, an hour, a day
and a week at which the mean losses of successive blocks of test rows are nearly uncorrelated. Without a time column
rows are taken as independent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from serin import metrics
from serin.columns.scored import LOSS_OF_TASK, measured, reliability, row_loss
from serin.columns.segments import segment_masks
from serin.errors import GateFailed
from serin.formats.quality import QualityReference
from serin.formats.schema import INT64_NULL, Schema, Task
from serin.formats.shards import read_split
from serin.formats.wire import Array, RawRows
from serin.scoring.answers import answers
from serin.spec.export import Metric
from serin.spec.pipeline import PipelineSpec

logger = logging.getLogger(__name__)


METRICS: Mapping[Task, tuple[Metric, ...]] = {
    "binary": ("auc", "logloss"),
    "multiclass": ("accuracy", "logloss"),
    "regression": ("rmse",),
}
MINUTE_S, HOUR_S, DAY_S, WEEK_S = 60.0, 3600.0, 86_400.0, 604_800.0
_ROWS: Final = 200_000  # the newest, where raw rows are not needed
_CORRELATION: Final = 0.1
_FEWEST_BLOCKS: Final = 8
_CLIP_QUANTILE: Final = 0.999
_CLIP: Final = (4.0, 100.0)  # of a squared error, in units of the test rows' mean


def measure(target: Array, given: Mapping[str, Array], task: Task) -> dict[str, float]:
    """Returns the task's metrics; one that this split cannot give (AUC with one class only) is left out.

    With several targets: the mean of each metric that all of them have.
    """
    if target.ndim == 2:
        columns = range(target.shape[1])
        each = [measure(target[:, at], {"score": given["score"][:, [at]]}, task) for at in columns]
        both = [name for name in METRICS[task] if all(name in one for one in each)]
        return {name: sum(one[name] for one in each) / len(each) for name in both}
    scores = given["probabilities"] if task == "multiclass" else given["score"][:, 0]
    found: dict[str, float] = {}
    for name in METRICS[task]:
        try:
            found[name] = metrics.measure(name, target, scores)
        except ValueError as error:
            if name != "auc":
                raise GateFailed(
                    stage="metric", what=f"{name} on the test split", found=str(error)
                ) from error
    return found


def by_target(schema: Schema, target: Array, scores: Array) -> Iterator[tuple[str, Array, Array]]:
    """Truth and answers by the target's name; a single one has none."""
    if not schema.targets:
        yield "", target, scores[:, 0] if scores.shape[1] == 1 else scores
        return
    for at, name in enumerate(schema.targets):
        yield name, target[:, at], scores[:, at]


def loss(metric: str, reference: float, found: float) -> float:
    """Returns how much worse `found` is than `reference`; below 0 when it is better. For an rmse relative to it."""
    if metric in metrics.HIGHER_IS_BETTER:
        return reference - found
    return (found - reference) / (reference if metric == "rmse" and reference else 1.0)


def measure_quality(
    spec: PipelineSpec,
    schema: Schema,
    dataset: Path,
    logits: Callable[[Array, Array], Array],
    rows: RawRows | None,
    given: dict[str, Array] | None,
) -> QualityReference:
    """Measures the test rows: `rows` and their answers `given` where raw rows were read, else those of the dataset."""
    if rows is None or given is None:
        split = read_split(dataset, "test").whole()
        split = split[max(0, len(split) - _ROWS) :] if len(split) > _ROWS else split
        truth = np.asarray(split.target)
        given = answers(logits(np.array(split.num), split.cat.astype(np.int64)), schema.task)
    else:
        truth = rows.target
    scores = given[schema.outputs[-1].name]
    scores = scores[:, 0] if scores.shape[1] == 1 else scores
    masks = {} if rows is None else segment_masks(rows.table, spec.export.segments)
    return measure_scores(schema, truth, scores, masks, lambda losses: _block_s(spec, rows, losses))


def measure_scores(
    schema: Schema, truth: Array, scores: Array, masks: Mapping[str, Array], block_s: Callable[[Array], float]
) -> QualityReference:
    """Measures answers whose truth is known. `masks`: the rows of each segment. `block_s`: within which time rows may
    depend on each other, by their losses."""
    scale, clip = _scale(schema, truth, scores)
    losses = row_loss(schema.task, truth, scores, scale=scale, clip=clip)
    found = QualityReference(
        rows=len(truth),
        loss_name=LOSS_OF_TASK[schema.task],
        loss=float(losses.mean()),
        scale=scale,
        clip=clip,
        block_s=block_s(losses),
        metrics=measured(schema.task, truth, scores, schema.targets),
        reliability=tuple((b.score, b.rate, b.rows) for b in reliability(schema.task, truth, scores)),
        segments={
            name: measured(schema.task, truth[mask], scores[mask], schema.targets)
            for name, mask in masks.items()
        },
    )
    logger.info(f"quality: mean {found.loss_name} {found.loss:.4f} on {found.rows:,} rows")
    return found


def _scale(schema: Schema, truth: Array, scores: Array) -> tuple[float, float]:
    """Of a regression, the mean squared error of the test rows, and the multiple of it at which errors are cut."""
    if schema.task != "regression":
        return 1.0, 1.0
    squared = (scores.astype(np.float64) - truth) ** 2
    mean = float(squared.mean()) or 1.0
    return mean, float(np.clip(np.quantile(squared / mean, _CLIP_QUANTILE), *_CLIP))


def _block_s(spec: PipelineSpec, rows: RawRows | None, losses: Array) -> float:
    time = spec.data.time
    if time is None:
        return MINUTE_S
    if rows is None or time not in rows.table.column_names:
        return DAY_S  # rows depend on time, and it is not known for how long
    return time_block_s(rows.table.column(time).to_numpy().astype(np.int64), losses)


def time_block_s(moments: Array, losses: Array) -> float:
    """The block of rows with these losses. `moments`: microseconds since 1970."""
    known = moments != INT64_NULL
    for seconds in (MINUTE_S, HOUR_S, DAY_S):
        if _uncorrelated(moments[known] // int(seconds * 1e6), losses[known]):
            return seconds
    return WEEK_S


def _uncorrelated(block: Array, losses: Array) -> bool:
    """Whether the mean losses of blocks that follow each other have little to do with each other."""
    kinds, codes = np.unique(block, return_inverse=True)
    means = np.bincount(codes, losses) / np.bincount(codes)
    if len(kinds) < _FEWEST_BLOCKS or not means.std():
        return False
    each = means - means.mean()
    together = float(each[1:] @ each[:-1] / (each @ each))
    return together < max(_CORRELATION, 1 / math.sqrt(len(kinds)))
