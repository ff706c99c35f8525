"""Finds features that reveal the target, before anything is fitted, on a sample that does not depend on the pieces.

Enabled by data.time, for the columns of data.target.known_at_serving also without it, and by data.id for the same id in
two splits. Four signs: a column that orders or identifies the target almost without error; one whose nulls do; one that
is missing just where the target is; an id in two splits.

A score of 1 is a perfect prediction; 0 when it cannot be judged. A column is scored by its order (of numbers) and by
its values: the targets of each value's rows, learned on every other row and evaluated on the rest, so that ids predict
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.columns.coded import CodedColumn, compact
from serin.columns.column import Column
from serin.errors import LeakFound
from serin.etl.dataset.transform import ID, Divided, TrainSample
from serin.etl.engines.engine import Engine, Held
from serin.etl.relational.groups import group_codes, joined
from serin.etl.relational.relation import Unknown
from serin.formats.dataset import SPLITS
from serin.spec.data import DataSpec

LEAK_SCORE = 0.99
"""The score by values above which a column is a leak, for the leak check and for drafts."""
NULL_LEAK_SCORE = 0.95
"""The same for whether a column is null."""
FEWEST = 100  # rows below which nothing can be judged
_BINS = 64
_WIDEST = 2**62

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.integer[Any]]
Ids = list[tuple[Column, npt.NDArray[np.int64]]]  # of each split: ids and rows


def judge_leaks(
    data: DataSpec,
    columns: Sequence[str],
    train_sample: TrainSample,
    ids: Sequence[Ids],
    *,
    unknown: Sequence[Mapping[str, Unknown]],
    without_target: int,
) -> None:
    """LeakFound with every leak that data.allow_leaks does not name. `ids`: of each piece."""
    names = [name for name in columns if name not in data.allow_leaks]
    known = {name for name in names if data.made_of([name]) & set(data.target.known_at_serving)}
    leaks: list[tuple[str, str]] = []
    if data.time is not None:
        for name in names:
            parts = [part[name] for part in unknown]
            if name not in known and missing_together(
                parts, without_target
            ):  # nulls of the known make the target's
                share = f"{sum(part.both for part in parts):,} of the {without_target:,} rows"
                why = f"is missing in {share} whose target is missing: it seems to be filled after the event"
                leaks.append((name, why))
    targets = train_sample.target.astype(np.float64).reshape(len(train_sample.target), -1)
    for name in names if data.time is not None else [name for name in names if name in known]:
        told = (_tells(name, train_sample.columns[name], target, data.target.task) for target in targets.T)
        leaks += [leak for each in told for leak in each][:1]  # one target that it knows is enough
    if data.id is not None and data.id not in data.allow_leaks:
        leaks += _on_both_sides(data.id, ids)
    if leaks:
        raise LeakFound(leaks=leaks)


def collect_ids(data: DataSpec, engine: Engine, held: Held) -> list[Ids]:
    """Returns the ids (data.id) of each split piece; empty without an id, or if it may be in several splits."""
    if data.id is None or data.id in data.allow_leaks:
        return []
    return engine.collect(ids_by_split, held)


def ids_by_split(divided: Divided) -> Ids:
    """For each split its ids and rows."""
    spans = [divided.span(split) for split in range(len(SPLITS))]
    return [(divided.columns[ID][span], divided.rows[span]) for span in spans]


def _on_both_sides(name: str, parts: Sequence[Ids]) -> Iterator[tuple[str, str]]:
    flat = [(column, rows, split) for part in parts for split, (column, rows) in enumerate(part)]
    ids = joined([column for column, _, _ in flat])
    rows = np.concatenate([own for _, own, _ in flat])
    splits = np.concatenate([np.full(len(own), split) for _, own, split in flat])
    codes = group_codes([ids])
    order = np.lexsort((rows, splits, codes))
    crossing = (codes[order][1:] == codes[order][:-1]) & (splits[order][1:] != splits[order][:-1])
    crossing &= ~np.asarray(ids.null)[order][1:]
    places = np.flatnonzero(crossing)
    if len(places):
        first, second = order[places[0]], order[places[0] + 1]
        value = ids[first : first + 1].to_arrow().to_pylist()[0]
        text = (
            f"names the same thing in two splits {len(places):,} times: {value!r} is in {SPLITS[splits[first]]} "
            f"(row {rows[first]}) and in {SPLITS[splits[second]]} (row {rows[second]}); split: {{kind: group, "
            f"group: {name}}} keeps such rows together"
        )
        yield name, text


def missing_together(parts: Sequence[Unknown], without: int) -> bool:
    """Whether a column is missing just where the target is. `without`: rows without a target."""
    rows, null, both = (sum(each) for each in zip(*parts, strict=True))
    return bool(without and null >= max(10, 0.001 * rows) and both > 0.8 * without and both > 0.5 * null)


def _tells(name: str, column: Column, target: Floats, task: str) -> Iterator[tuple[str, str]]:
    null = np.asarray(column.null)
    if null.any():
        strength = 0.0 if null.all() else score_by_nulls(null, target, task)
        if strength > NULL_LEAK_SCORE:
            why = f"has nulls that predict the target ({strength:.3f} of 1): it seems to be filled after the event"
            yield name, why
            return
        column, target = column[~null], target[~null]
    strength = score_by_values(column, target, task)
    if strength > LEAK_SCORE:
        yield name, f"alone predicts the target almost without error ({strength:.3f} of 1)"


def score_by_nulls(null: npt.NDArray[np.bool_], target: Floats, task: str) -> float:
    """Scores whether the value is null, alone."""
    codes = null.astype(np.int64)
    if task != "binary" or len(target) < FEWEST or target.min() == target.max():
        return max(_by_order(codes, target, task), _by_value(codes, target, task))
    # two groups are in order without being sorted
    groups = np.cumsum(np.bincount((codes << 1) | (target == 1), minlength=4).reshape(2, 2), axis=0)
    return max(_area(groups[:, 1], groups[:, 0]), _by_value(codes, target, task))


def score_by_values(column: Column, target: Floats, task: str) -> float:
    """Scores a column without nulls."""
    if len(column) < FEWEST:
        return 0.0
    found = [0.0]
    if column.kind != "string" and task != "multiclass":
        found.append(_by_order(column.values, target, task))
    codes = _codes(column, task)
    if codes is not None:
        found.append(_by_value(codes, target, task))
    return max(found)


def _codes(column: Column, task: str) -> Codes | None:
    """The same number for equal values; None when nearly every row has a different value."""
    if column.kind == "string":
        return column.values
    if column.kind in ("int", "bool"):
        coded = compact(column)
        return coded.places.rows if isinstance(coded, CodedColumn) else group_codes([column])
    if task == "multiclass":
        values = column.values.astype(np.float64)
        return np.searchsorted(np.quantile(values, np.linspace(0, 1, _BINS + 1)[1:-1]), values)
    return None


def _by_order(values: npt.NDArray[Any], target: Floats, task: str) -> float:
    if task == "multiclass" or len(target) < FEWEST or not np.isfinite(values).all():
        return 0.0
    low, high = values.min(), values.max()
    if low == high or target.min() == target.max():
        return 0.0
    if task == "binary":
        return _area_of_rows(values, int(low), int(high), target == 1)
    return abs(float(np.corrcoef(_ranks(values), _ranks(target))[0, 1]))


def _area_of_rows(values: npt.NDArray[Any], low: int, high: int, label: npt.NDArray[np.bool_]) -> float:
    """The area under the curve, or 1 minus it: whichever is larger."""
    if values.dtype == np.float32:
        bits = (values + np.float32(0)).view(np.int32)  # no -0
        keys = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    elif values.dtype.kind == "i" and high - low < _WIDEST:
        keys = values.astype(np.int64) - low
    else:
        keys = np.unique(values, return_inverse=True)[1].astype(np.int64)
    # value and label in one integer: integers are sorted several times faster than positions are
    packed = np.sort((keys << 1) | label)
    value, label = packed >> 1, (packed & 1).astype(bool)
    last = np.append(np.flatnonzero(value[1:] != value[:-1]), len(value) - 1)
    positives = np.cumsum(label)[last]
    return _area(positives, last + 1 - positives)


def _area(positives: Codes, negatives: Codes) -> float:
    """Of groups in order of score: how many of each kind there are up to the end of each group."""
    inside = np.diff(positives, prepend=0)
    below = np.concatenate([[0], negatives[:-1]])
    pairs = int(positives[-1]) * int(negatives[-1])
    area = int((inside * (below + negatives)).sum()) / (2 * pairs)
    return max(area, 1 - area)


def _by_value(codes: Codes, target: Floats, task: str) -> float:
    size = int(codes.max(initial=0)) + 1
    learnt, asked = np.bincount(codes[::2], minlength=size), np.bincount(codes[1::2], minlength=size)
    known = np.where(learnt > 0, asked, 0)
    rows = int(known.sum())
    if rows < max(FEWEST // 2, 0.25 * len(codes)):
        return 0.0
    if task == "multiclass":
        return _names_classes(codes, target.astype(np.int64), learnt > 0, size)
    sums = np.bincount(codes[::2], weights=target[::2], minlength=size)
    means = sums / np.maximum(learnt, 1)
    if task == "regression":
        rest = np.flatnonzero(learnt[codes[1::2]] > 0)
        return _by_order(means[codes[1::2][rest]], target[1::2][rest], task)
    used = np.flatnonzero(known)
    right = np.bincount(codes[1::2], weights=target[1::2], minlength=size)[used].astype(np.int64)
    if rows < FEWEST or not 0 < right.sum() < rows or np.ptp(means[used]) == 0:
        return 0.0
    order = np.argsort(means[used], kind="stable")
    scores, positives = means[used][order], np.cumsum(right[order])
    last = np.append(np.flatnonzero(scores[1:] != scores[:-1]), len(scores) - 1)
    return _area(positives[last], np.cumsum(known[used][order])[last] - positives[last])


def _names_classes(
    codes: Codes, labels: npt.NDArray[np.int64], learnt: npt.NDArray[np.bool_], size: int
) -> float:
    classes = int(labels.max()) + 1
    table = np.bincount(codes[::2] * classes + labels[::2], minlength=size * classes)
    rest = learnt[codes[1::2]]
    asked, right = codes[1::2][rest], labels[1::2][rest]
    if np.bincount(right).max() > 0.9 * len(right):
        return 0.0
    return float((table.reshape(size, classes).argmax(axis=1)[asked] == right).mean())


def _ranks(values: npt.NDArray[Any]) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts + ends - 1) / 2)[place])
