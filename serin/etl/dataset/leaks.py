"""Finds features that reveal the target, before anything is fitted, on a sample that does not depend on the pieces.

Enabled by data.time, for the columns of data.target.known_at_serving also without it, and by data.id for the same id in
two splits. Four signs: a column that orders or identifies the target almost without error; one whose nulls do; one that
is missing just where the target is; an id in two splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from serin.columns.column import Column
from serin.errors import LeakFound
from serin.etl.dataset.leak_scores import LEAK_SCORE, NULL_LEAK_SCORE, score_by_nulls, score_by_values
from serin.etl.dataset.train_sample import TrainSample
from serin.etl.dataset.transform import ID, Divided
from serin.etl.engines.engine import Engine, Held
from serin.etl.relational.groups import group_codes, joined
from serin.etl.relational.relation import Unknown
from serin.formats.dataset import SPLITS
from serin.spec.data import DataSpec

Floats = npt.NDArray[np.float64]
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
            if name not in known:  # whose nulls make nulls of the target
                leaks += _missing_together(name, [part[name] for part in unknown], without_target)
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


def _missing_together(name: str, parts: Sequence[Unknown], without: int) -> Iterator[tuple[str, str]]:
    if missing_together(parts, without):
        both = sum(part.both for part in parts)
        text = f"is missing in {both:,} of the {without:,} rows whose target is missing: it seems to be filled after"
        yield name, f"{text} the event"


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
