"""What a bundle says about its raw columns: the importance of each, and what explanations of single scores need.

For explanations it keeps the trained model, the raw column of each feature and the baseline. A model that is nothing
but a graph (from a script, or trained elsewhere) has no trees or weights to keep. Members of a blend are explained by
different methods, whose parts do not belong to one baseline.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from serin.export.convert.fuse import FeatureGraph
from serin.export.gate.quality import METRICS, loss, measure
from serin.features.plan import FeaturePlan
from serin.formats.dataset import DatasetDescription, DerivedDescription
from serin.formats.explain import FOLDER, ExplainRecord, FeatureColumns, write_explain
from serin.formats.importance import ColumnImportance, Importance
from serin.formats.schema import ONLINE, Task
from serin.formats.shards import read_split
from serin.formats.trained import BLEND, GRAPH, RECORD, find_trained
from serin.formats.wire import Array
from serin.machine.stopping import check_stopped
from serin.models.trees import Margins
from serin.scoring.answers import answers

logger = logging.getLogger(__name__)


_BASELINE_ROWS = 100_000
_ROWS, _REPEATS, _SEED = 4096, 5, 0
_SECONDS = 10.0  # after which no further repeat begins


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
    record, file = find_trained(trained)
    if record.file in (GRAPH, BLEND):
        return
    folder = work / FOLDER
    folder.mkdir()
    shutil.copyfile(trained / RECORD, folder / RECORD)
    if not (work / record.file).exists():  # else the graph refers to it, and `find_trained` finds it there
        shutil.copyfile(file, folder / record.file)
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


# A request column and a column of a lookup are raw. A derived column that reads a single raw column belongs to it; one
# that reads several is its own column, because its effect cannot be divided among them.
def trace_features(plan: FeaturePlan, data: DatasetDescription) -> FeatureColumns:
    """The raw column of every feature of the plan, in the order of the model's inputs."""
    derived = {each.name: each for each in data.derived}
    numeric = [_owner(feature.columns, derived) for feature in plan.numbers]
    categorical = [_owner(feature.columns, derived) for feature in plan.categories for _ in feature.outputs]
    named = dict.fromkeys((*numeric, *categorical))
    return FeatureColumns(
        numeric=tuple(numeric),
        categorical=tuple(categorical),
        sources={name: _source(name, data, derived) for name in named},
    )


def _owner(columns: Iterable[str], derived: Mapping[str, DerivedDescription]) -> str:
    names = sorted(columns)
    roots = {root for name in names for root in _roots(name, derived)}
    return roots.pop() if len(roots) == 1 else " and ".join(names)


def _roots(name: str, derived: Mapping[str, DerivedDescription]) -> set[str]:
    """The raw columns that a column is made of; a raw one is made of itself."""
    if name not in derived:
        return {name}
    return {root for read in derived[name].kinds for root in _roots(read, derived)}


def _source(name: str, data: DatasetDescription, derived: Mapping[str, DerivedDescription]) -> str:
    if name in derived:
        return f"derived: {derived[name].expression}"
    for table in data.lookups:
        if name in table.columns:
            return f"lookup in {table.name} by {table.key}"
    online = {column.name for column in data.inputs if column.source == ONLINE}
    return "online window" if name in online else "request"


# Permutation importance: the loss of the metric when the values of one raw column are shuffled among the test rows. All
# features of a raw column are shuffled together, in the same order. The same seed gives the same numbers; a slow model
# is given fewer repeats, never another order.
def measure_importance(
    logits: Margins, dataset: Path, columns: FeatureColumns, task: Task, metric: str | None = None
) -> Importance | None:
    """Returns the importance of every raw column, the most important first; None when the sample does not give the
    metric (by default the task's own)."""
    rows, metric = read_split(dataset, "test").whole(), metric or METRICS[task][0]
    rows = rows[:: max(1, -(-len(rows) // _ROWS))]  # from all over the split, the same in every run
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
            with _shuffled(num, cat, columns, name, random.permutation(len(rows))):
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


@contextmanager
def _shuffled(num: Array, cat: Array, columns: FeatureColumns, name: str, order: Array) -> Iterator[None]:
    """Puts the rows of all features of a raw column into another order, and back."""
    numbers, codes = (
        [place for place, owner in enumerate(owners) if owner == name]
        for owners in (columns.numeric, columns.categorical)
    )
    before = num[:, numbers], cat[:, codes]
    num[:, numbers], cat[:, codes] = before[0][order], before[1][order]
    yield
    num[:, numbers], cat[:, codes] = before


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
