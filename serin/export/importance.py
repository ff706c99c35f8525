"""Permutation importance: the loss of the metric when the values of one raw column are shuffled among the test rows.

All features of a raw column are shuffled together, in the same order. The same seed gives the same numbers; a slow
model is given fewer repeats, never another order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from serin.export.gate.quality import METRICS, loss, measure
from serin.formats.explain import FeatureColumns
from serin.formats.importance import ColumnImportance, Importance
from serin.formats.schema import Task
from serin.formats.shards import Rows, read_split
from serin.formats.wire import Array
from serin.machine.stopping import check_stopped
from serin.scoring.answers import answers

logger = logging.getLogger(__name__)

_ROWS, _REPEATS, _SEED = 4096, 5, 0
_SECONDS = 10.0  # after which no further repeat begins

Logits = Callable[[Array, Array], Array]
"""num float32[n, k] and cat int64[n, m] to logits float32[n, outputs], as the served variant computes them."""


def measure_importance(
    logits: Logits, dataset: Path, columns: FeatureColumns, task: Task, metric: str | None = None
) -> Importance | None:
    """Returns the importance of every raw column, the most important first; None when the sample does not give the
    metric (by default the task's own)."""
    rows, metric = _sample(dataset), metric or METRICS[task][0]
    num, cat, target = np.array(rows.num), rows.cat.astype(np.int64), np.asarray(rows.target)

    def value() -> float | None:
        return measure(target, answers(logits(num, cat), task), task).get(metric)

    reference = value()
    if reference is None:
        logger.info(f"importance: {metric} cannot be measured on {len(rows):,} test rows")
        return None
    logger.info(f"importance of {len(columns.names)} columns on {len(rows):,} test rows")
    losses: dict[str, list[float]] = {name: [] for name in columns.names}
    begun, repeats = time.monotonic(), 0
    while repeats < _REPEATS and (repeats == 0 or time.monotonic() - begun < _SECONDS):
        random = np.random.default_rng([_SEED, repeats])
        for name in columns.names:
            check_stopped()
            with _shuffled(num, cat, _features_of(name, columns), random.permutation(len(rows))):
                found = value()
            assert found is not None  # the target is the same
            losses[name].append(loss(metric, reference, found))
        repeats += 1
    return Importance(
        metric=metric,
        value=reference,
        rows=len(rows),
        repeats=repeats,
        seed=_SEED,
        columns=_sorted(losses, columns),
    )


def _features_of(name: str, columns: FeatureColumns) -> tuple[list[int], list[int]]:
    """The places of a raw column's features among the numbers and among the codes."""
    numbers, codes = (
        [place for place, owner in enumerate(owners) if owner == name]
        for owners in (columns.numeric, columns.categorical)
    )
    return numbers, codes


@contextmanager
def _shuffled(num: Array, cat: Array, places: tuple[list[int], list[int]], order: Array) -> Iterator[None]:
    """Puts the rows of some features into another order, and back."""
    numbers, codes = places
    kept = num[:, numbers], cat[:, codes]
    num[:, numbers], cat[:, codes] = kept[0][order], kept[1][order]
    yield
    num[:, numbers], cat[:, codes] = kept


def _sorted(losses: Mapping[str, list[float]], columns: FeatureColumns) -> tuple[ColumnImportance, ...]:
    found = [
        ColumnImportance(
            column=name,
            source=columns.sources[name],
            loss=float(np.mean(each)),
            low=min(each),
            high=max(each),
        )
        for name, each in losses.items()
    ]
    return tuple(sorted(found, key=lambda column: -column.loss))


def _sample(dataset: Path) -> Rows:
    """Test rows from all over the split, the same in every run."""
    rows = read_split(dataset, "test").whole()
    return rows[:: -(-len(rows) // _ROWS)] if len(rows) > _ROWS else rows
