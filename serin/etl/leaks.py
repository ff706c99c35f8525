"""Finds features that know the answer: before anything is fitted, on a sample that does not depend on the pieces.

Armed by data.time (and data.id for the same thing in two splits). Four signs: a column that orders or names the answer
almost without fault; one whose nulls do; one that is missing just where the target is; an id in two splits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from serin.errors import LeakFound
from serin.etl.device import gpu_aware
from serin.etl.engine import Engine, Held
from serin.etl.groups import group_codes, joined, sampled
from serin.etl.transform import ID, Divided
from serin.etl.unknown import Unknown
from serin.features.column import Column, on_host, take
from serin.formats.dataset import SPLITS
from serin.metrics import auc
from serin.spec.data import DataSpec

SAMPLE_ROWS = 20_000
_FEWEST = 100  # rows below which nothing can be said
_ALMOST = 0.99
_NULLS_ALMOST = 0.95
_BINS = 64

Floats = npt.NDArray[np.float64]


def judge_leaks(
    data: DataSpec,
    columns: Sequence[str],
    engine: Engine,
    held: Held,
    *,
    rows: int,
    unknown: Sequence[Mapping[str, Unknown]],
    without_target: int,
) -> None:
    """LeakFound with every leak that data.allow_leaks does not name. `held`: divided pieces."""
    names = [name for name in columns if name not in data.allow_leaks]
    leaks: list[tuple[str, str]] = []
    if data.time is not None:
        for name in names:
            leaks += _missing_together(name, [part[name] for part in unknown], without_target)
        parts = engine.collect(sample, held, tuple(names), SAMPLE_ROWS / rows)
        target = np.concatenate([own for own, _ in parts]).astype(np.float64)
        for name in names:
            leaks += _tells(name, joined([own[name] for _, own in parts]), target, data.target.task)
    if data.id is not None and data.id not in data.allow_leaks:
        leaks += _on_both_sides(data.id, engine.collect(ids_by_split, held))
    if leaks:
        raise LeakFound(leaks=leaks)


@gpu_aware
def sample(
    divided: Divided, names: Sequence[str], share: float
) -> tuple[npt.NDArray[Any], dict[str, Column]]:
    """About this share of the training rows: their target and columns."""
    train = divided.span(0)
    chosen = sampled(divided.rows[train], share)
    columns = take({name: divided.columns[name][train] for name in names}, chosen)
    return on_host(divided.target[train][chosen]), {name: own.on_host() for name, own in columns.items()}


def ids_by_split(divided: Divided) -> list[tuple[Column, npt.NDArray[np.int64]]]:
    """For each split its ids and rows."""
    spans = [divided.span(split) for split in range(len(SPLITS))]
    return [(divided.columns[ID][span], divided.rows[span]) for span in spans]


def _on_both_sides(name: str, parts: Sequence[Any]) -> Iterator[tuple[str, str]]:
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


def _missing_together(name: str, parts: Sequence[Unknown], without: int) -> Iterator[tuple[str, str]]:
    rows, null, both = (sum(each) for each in zip(*parts, strict=True))
    if without and null >= max(10, 0.001 * rows) and both > 0.8 * without and both > 0.5 * null:
        text = f"is missing in {both:,} of the {without:,} rows whose target is missing: it seems to be filled after"
        yield name, f"{text} the event"


def _tells(name: str, column: Column, target: Floats, task: str) -> Iterator[tuple[str, str]]:
    null = np.asarray(column.null)
    if null.any() and not null.all():
        strength = _strength(null.astype(np.int64), null.astype(np.float64), target, task)
        if strength > _NULLS_ALMOST:
            yield (
                name,
                f"is null or not as the target goes ({strength:.3f}): it seems to be filled after the event",
            )
            return
    used = ~null
    if used.sum() < _FEWEST:
        return
    values = None if column.kind == "string" else column.values[used].astype(np.float64)
    codes = None
    if column.kind in ("string", "int", "bool"):
        codes = group_codes([column[used]])
    elif task == "multiclass" and values is not None:
        edges = np.quantile(values, np.linspace(0, 1, _BINS + 1)[1:-1])
        codes = np.searchsorted(edges, values)
    strength = _strength(codes, values, target[used], task)
    if strength > _ALMOST:
        yield name, f"alone gives the target almost without fault ({strength:.3f} of 1)"


def _strength(codes: npt.NDArray[np.int64] | None, values: Floats | None, target: Floats, task: str) -> float:
    """How well the column alone tells the target: 1 is without fault. 0 when nothing can be said."""
    found = [0.0]
    if task != "multiclass" and values is not None:
        found.append(_order(values, target, task))
    if codes is not None:
        found.append(_names(codes, target, task))
    return max(found)


def _order(values: Floats, target: Floats, task: str) -> float:
    if len(target) < _FEWEST or np.ptp(target) == 0 or not np.isfinite(values).all() or np.ptp(values) == 0:
        return 0.0
    if task == "binary":
        area = float(auc(target, values))
        return max(area, 1 - area)
    return abs(float(np.corrcoef(_ranks(values), _ranks(target))[0, 1]))


def _names(codes: npt.NDArray[np.int64], target: Floats, task: str) -> float:
    """Learns the target per value on every other row and looks at the rest, so that ids tell nothing."""
    learn = np.arange(len(codes)) % 2 == 0
    size = int(codes.max(initial=0)) + 1
    counts = np.bincount(codes[learn], minlength=size)
    known = ~learn & (counts[codes] > 0)
    if known.sum() < max(_FEWEST // 2, 0.25 * len(codes)):
        return 0.0
    if task == "multiclass":
        labels = target.astype(np.int64)
        table = np.zeros((size, int(labels.max()) + 1))
        np.add.at(table, (codes[learn], labels[learn]), 1)
        if np.bincount(labels[known]).max() > 0.9 * known.sum():
            return 0.0
        return float((table.argmax(axis=1)[codes[known]] == labels[known]).mean())
    means = np.bincount(codes[learn], weights=target[learn], minlength=size) / np.maximum(counts, 1)
    return _order(means[codes[known]], target[known], task)


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[place]
