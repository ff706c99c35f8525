"""How the target goes with each column, bin by bin over the training rows: what the data report shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.etl.device import gpu_aware
from serin.etl.engine import Engine, Held
from serin.features.column import Column, on_host
from serin.formats.schema import INT64_NULL
from serin.formats.statistics import CategoryStatistics, ColumnStatistics, NumberStatistics

if TYPE_CHECKING:
    from serin.etl.transform import Divided

Floats = npt.NDArray[np.float64]
SAMPLE_ROWS = 50_000
_SHOWN = 10  # commonest values
_BINS = 32  # of numbers, about equally many rows in each
_TIMES = 48  # bins of a time, equally long


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bins:
    """Rows and target by bin. The last bin holds nulls; of categories, the one before it all other values."""

    edges: Floats | None  # of numbers and times
    values: tuple[str | int, ...]  # of categories
    rows: Floats
    target: Floats  # sums
    squares: Floats

    def means(self) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(self.target / self.rows)

    def explained(self) -> float:
        """Which share of the target's variance the bins explain; a bin of few rows explains less than it seems to."""
        total = self.rows.sum()
        mean = self.target.sum() / max(total, 1)
        variance = float(self.squares.sum() / max(total, 1) - mean**2)
        used = self.rows > 0
        between = float((self.rows[used] * (self.means()[used] - mean) ** 2).sum() / max(total, 1))
        chance = variance * (used.sum() - 1) / max(total, 1)
        return max(0.0, min(1.0, (between - chance) / variance)) if variance > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """How a column is cut: by edges, or by values."""

    edges: Floats | None
    values: tuple[str | int, ...]


def relate_to_target(
    engine: Engine,
    held: Held,
    statistics: Mapping[str, ColumnStatistics],
    times: Sequence[str],
    label: int | None,
    rows: int,
) -> dict[str, Bins]:
    """One pass (two, with times). `label`: the class whose share is shown; None: the target itself."""
    plans = {name: _plan(each) for name, each in statistics.items()}
    if times:
        found = engine.collect(extent, held, tuple(times))
        for name in times:
            known = [part[name] for part in found if part[name] is not None]
            if known:
                first, last = min(low for low, _ in known), max(high for _, high in known)
                plans[name] = _Plan(np.linspace(first, last + 1, _TIMES + 1), ())
    counted = engine.collect(count_bins, held, plans, label, max(1, rows // SAMPLE_ROWS))
    made = {}
    for name, plan in plans.items():
        count, target, squares = np.sum([part[name] for part in counted], axis=0)
        made[name] = Bins(edges=plan.edges, values=plan.values, rows=count, target=target, squares=squares)
    return made


@gpu_aware
def extent(divided: Divided, names: Sequence[str]) -> dict[str, tuple[int, int] | None]:
    """The first and the last moment of times, over the training rows."""
    found: dict[str, tuple[int, int] | None] = {}
    for name in names:
        values = divided.columns[name].values[divided.span(0)]
        known = values[values != INT64_NULL]
        found[name] = (int(known.min()), int(known.max())) if len(known) else None
    return found


@gpu_aware
def count_bins(
    divided: Divided, plans: Mapping[str, _Plan], label: int | None, step: int
) -> dict[str, Floats]:
    """Rows, sums and squares of the target by bin, [3, bins], over every so many of the training rows."""
    train = divided.span(0)
    some = slice(train.start, train.stop, step)
    target = on_host(divided.target[some]).astype(np.float64)
    if label is not None:
        target = (target == label).astype(np.float64)
    return {name: _count(divided.columns[name][some].on_host(), plan, target) for name, plan in plans.items()}


def _plan(statistics: ColumnStatistics) -> _Plan:
    if isinstance(statistics, CategoryStatistics):
        return _Plan(None, statistics.values[:_SHOWN])
    assert isinstance(statistics, NumberStatistics)
    ends = np.cumsum(statistics.counts)
    if not len(ends) or ends[-1] == 0:
        return _Plan(np.asarray([0.0, 1.0]), ())
    wanted = np.searchsorted(ends, np.linspace(0, ends[-1], _BINS + 1)[1:])
    places = np.unique(np.minimum(wanted, len(ends) - 1)) + 1
    return _Plan(np.asarray([statistics.edges[0], *(statistics.edges[place] for place in places)]), ())


def _count(column: Column, plan: _Plan, target: Floats) -> Floats:
    if plan.edges is not None:
        numbers = column.values.astype(np.float64)
        bins = np.clip(np.searchsorted(plan.edges, numbers, side="right") - 1, 0, len(plan.edges) - 2)
        size = len(plan.edges)  # one bin more: nulls
    else:
        bins, size = _places(column, plan.values), len(plan.values) + 2
    bins = np.where(np.asarray(column.null), size - 1, bins)
    counted = [np.bincount(bins, weights=weights, minlength=size) for weights in (None, target, target**2)]
    return np.asarray(counted, np.float64)


def _places(column: Column, values: tuple[str | int, ...]) -> npt.NDArray[np.int64]:
    """Each row's place among the values; the place after them for all others."""
    if column.dictionary is None:
        found = pc.index_in(pa.array(column.values.astype(np.int64)), value_set=pa.array(values, pa.int64()))
        return np.asarray(found.fill_null(len(values)).to_numpy(zero_copy_only=False)).astype(np.int64)
    texts = pa.array([str(value) for value in values], pa.string())
    entries = pc.index_in(column.dictionary, value_set=texts).fill_null(len(values))
    return np.append(entries.to_numpy(zero_copy_only=False), len(values))[column.values].astype(np.int64)
