"""The dataset half of the work on one piece: rows put into their splits and sampled, features computed and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column, any_true, array_module, beside, count_true, on_host, take, tally
from serin.etl.dataset.golden import Candidates, pick_candidates
from serin.etl.dataset.split import LEFT_OUT, SplitRule
from serin.etl.engines.device import FileDigests, gpu_aware, store_rows
from serin.etl.engines.engine import Engine, Held
from serin.etl.relational.groups import joined, sampled
from serin.etl.relational.relation import Prepared
from serin.etl.relational.target import Class, first_target
from serin.features.plan import FeaturePlan
from serin.formats.dataset import SPLITS
from serin.formats.schema import InputColumn
from serin.formats.shards import Rows, RowWriter, digested_whole

_TEST = SPLITS.index("test")
SAMPLE_ROWS = 20_000
_FEW_CLASSES = 4
_BLOCK_ROWS = 2**15  # that are written at once
ID = "\0id"  # data.id among a piece's columns; no column of a table is called so


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divided:
    """A piece's rows, those of train first, then valid, then test; within each in order of row id."""

    columns: Mapping[str, Column]
    rows: npt.NDArray[np.int64]
    fold_ids: npt.NDArray[np.int64]  # the rows' ids; in a split by group the groups'
    target: npt.NDArray[np.float32]
    ends: tuple[int, int, int]

    def span(self, split: int) -> slice:
        return slice(self.ends[split - 1] if split else 0, self.ends[split])


@gpu_aware
def divide(prepared: Prepared, rule: SplitRule, classes: Sequence[Class]) -> Divided:
    columns, rows, target = prepared.columns, prepared.rows, prepared.target.coded(classes)
    own = {} if prepared.id is None else {ID: prepared.id}
    place = rule.place(prepared, target)
    xp = array_module(place)
    counts = [count_true(place == split) for split in range(LEFT_OUT)]
    first, second, third = (int(end) for end in np.cumsum(counts))
    columns = {**columns, **own}
    group = prepared.group
    if third < len(rows) or any_true(place[1:] < place[:-1]):  # else all are in this order already
        order = xp.concatenate([xp.flatnonzero(place == split) for split in range(LEFT_OUT)])
        columns = take(columns, order)
        rows, target = rows[order], target[order]
        group = None if group is None else group[order]
    fold_ids = rows if group is None else beside(group, rows).astype(np.int64)
    return Divided(columns=columns, rows=rows, fold_ids=fold_ids, target=target, ends=(first, second, third))


@gpu_aware
def count_rows(divided: Divided, classes: int) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Rows per split, and training rows per class (none for a regression; of several targets, [target, class])."""
    sizes = [divided.span(split).stop - divided.span(split).start for split in range(len(SPLITS))]
    target = divided.target[divided.span(0)]
    if target.ndim == 2:  # several targets, one row each
        seen = [
            [count_true(target[:, at] == each) for each in range(classes)] for at in range(target.shape[1])
        ]
        return sizes, np.asarray(seen, np.int64)
    if classes <= _FEW_CLASSES:  # comparing is quicker than counting
        return sizes, np.asarray([count_true(target == each) for each in range(classes)], np.int64)
    return sizes, on_host(tally(target.astype(np.int64), classes)).astype(np.int64)


@gpu_aware
def target_ends(divided: Divided) -> npt.NDArray[np.float32] | None:
    """The least and the largest target of the training rows, [2, targets]; None where a piece has none of them."""
    target = on_host(divided.target[divided.span(0)])
    target = target.reshape(len(target), -1)
    return np.stack([target.min(axis=0), target.max(axis=0)]) if len(target) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What is known of a written piece. `candidates`: the rows that may become golden, when there are test rows.
    `digests`: of files that begin with rows of it, where the rows came from a GPU."""

    candidates: Candidates | None
    digests: FileDigests


@gpu_aware
def write_piece(
    divided: Divided,
    starts: Sequence[int],
    plan: FeaturePlan,
    folder: str,
    inputs: tuple[InputColumn, ...],
    classes: int,
) -> Written:
    """Makes the features and writes each split's rows from its own start on."""
    here = all(column.xp is np for column in divided.columns.values())
    make = _write_from_host if here else _write_from_gpu
    num, cat, digests = make(divided, starts, plan, Path(folder))
    test = divided.span(_TEST)
    if test.stop == test.start:
        return Written(candidates=None, digests=digests)
    candidates = pick_candidates(
        inputs,
        plan,
        {name: column[test] for name, column in divided.columns.items()},
        divided.rows[test],
        num,
        cat,
        first_target(divided.target[test]),
        classes,
    )
    return Written(candidates=candidates, digests=digests)


def _write_from_host(
    divided: Divided, starts: Sequence[int], plan: FeaturePlan, folder: Path
) -> tuple[Any, Any, FileDigests]:
    """Block by block; num and cat of the test rows are kept."""
    blocks = plan.block_transform(divided.columns, divided.fold_ids[divided.span(0)])
    widths = len(plan.numeric), len(plan.categorical)
    for split, name in enumerate(SPLITS):
        span = divided.span(split)
        size = span.stop - span.start
        rows = size if split == _TEST else min(size, _BLOCK_ROWS)
        num, cat = np.empty((rows, widths[0]), np.float32), np.empty((rows, widths[1]), np.int32)
        with RowWriter(folder / name) as writer:
            for start in range(0, size, max(rows, 1)):
                count = min(rows, size - start)
                part = slice(span.start + start, span.start + start + count)
                blocks.fill(part.start, num[:count], cat[:count])
                target, ids = divided.target[part], divided.rows[part]
                made = Rows(num=num[:count], cat=cat[:count], target=target, rows=ids)
                writer.write(starts[split] + start, made)
    return num, cat, {}


def _write_from_gpu(
    divided: Divided, starts: Sequence[int], plan: FeaturePlan, folder: Path
) -> tuple[Any, Any, FileDigests]:
    num, cat = plan.transform(divided.columns, divided.fold_ids[divided.span(0)])
    spans = [(divided.span(split), folder / name, starts[split]) for split, name in enumerate(SPLITS)]
    places = (
        (
            place,
            start,
            Rows(num=num[span], cat=cat[span], target=divided.target[span], rows=divided.rows[span]),
        )
        for span, place, start in spans
        if span.stop > span.start
    )
    digests = store_rows(places, digested_whole(plan.approximate))
    test = divided.span(_TEST)
    return num[test], cat[test], digests


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainSample:
    """A sample of the training rows, collected once, for the leak check and the charts of the report. Row ids alone
    decide which rows are in it. `share`: the approximate share of the training rows; 1 when all of them are here."""

    columns: Mapping[str, Column]
    target: npt.NDArray[np.float32]
    share: float


def take_train_sample(engine: Engine, held: Held, names: Sequence[str], *, rows: int) -> TrainSample:
    """The sample of divided pieces that have `rows` rows in all."""
    share = min(1.0, SAMPLE_ROWS / rows)
    parts = engine.collect(sample_piece, held, tuple(names), share)
    return TrainSample(
        columns={name: joined([columns[name] for _, columns in parts]) for name in names},
        target=np.concatenate([target for target, _ in parts]),
        share=share,
    )


@gpu_aware
def sample_piece(
    divided: Divided, names: Sequence[str], share: float
) -> tuple[npt.NDArray[np.float32], dict[str, Column]]:
    """The target and the columns of the piece's part of the sample."""
    train = divided.span(0)
    chosen = sampled(divided.rows[train], share)
    columns = take({name: divided.columns[name][train] for name in names}, chosen)
    own = {name: column.on_host().with_few_texts() for name, column in columns.items()}
    return on_host(divided.target[train][chosen]), own
