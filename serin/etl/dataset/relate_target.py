"""Relates the target to each column, bin by bin over the training rows, for the data report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.coded import CodedColumn, compact
from serin.columns.column import Column
from serin.etl.dataset.transform import TrainSample
from serin.etl.engines.device import gpu_aware
from serin.etl.engines.engine import Engine, Held
from serin.etl.relational.target import first_target
from serin.formats.schema import INT64_NULL
from serin.formats.statistics import CategoryStatistics, ColumnStatistics, NumberStatistics
from serin.reports.charts import Floats
from serin.reports.data_report import Bins

if TYPE_CHECKING:
    from serin.etl.dataset.transform import Divided

Extent = tuple[int, int]
_SHOWN = 10  # commonest values
_BINS = 32  # of numbers, about equally many rows in each
_TIMES = 48  # bins of a time, equally long
_EXACT = 2.0**50  # beyond it a float is not half a unit away from its neighbours
_UNIQUE_IS_AN_ID = 1000  # rows; among fewer, different integers may be a measurement
_EXACT_INTEGERS = 2.0**53  # larger ones are ids even among few rows
_EXAMPLES = 3
_WHOLE = 80  # integers within this range get a bin each: years, hours, marks


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """How a column is cut: by edges, or by values."""

    edges: Floats | None
    values: tuple[str | int, ...]
    whole: bool = False
    examples: tuple[str | int, ...] = ()


def relate_to_target(
    train_sample: TrainSample,
    statistics: Mapping[str, ColumnStatistics],
    extents: Mapping[str, Extent | None],
    label: int | None,
) -> dict[str, Bins]:
    """`extents`: of columns that are times. `label`: the class whose share is shown; None: the target itself."""
    plans = {name: _plan(each, train_sample.columns[name]) for name, each in statistics.items()}
    for name, extent in extents.items():
        if extent is not None:
            plans[name] = _Plan(np.linspace(extent[0], extent[1] + 1, _TIMES + 1), ())
    target = first_target(train_sample.target).astype(np.float64)
    if label is not None:
        target = (target == label).astype(np.float64)
    made = {}
    for name, plan in plans.items():
        count, sums, squares = _count(train_sample.columns[name], plan, target, same=label is not None)
        made[name] = Bins(
            edges=plan.edges,
            values=plan.values,
            rows=count,
            target=sums,
            squares=squares,
            whole=plan.whole,
            examples=plan.examples,
        )
    return made


def find_extents(engine: Engine, held: Held, times: Sequence[str]) -> dict[str, Extent | None]:
    """The first and the last moment of times, over the training rows of divided pieces; None when there is none."""
    parts = engine.collect(extent, held, tuple(times)) if times else []
    found: dict[str, Extent | None] = {}
    for name in times:
        known = [part[name] for part in parts if part[name] is not None]
        found[name] = (min(low for low, _ in known), max(high for _, high in known)) if known else None
    return found


@gpu_aware
def extent(divided: Divided, names: Sequence[str]) -> dict[str, Extent | None]:
    found: dict[str, Extent | None] = {}
    for name in names:
        values = divided.columns[name].values[divided.span(0)]
        low = int(values.min()) if len(values) else 0
        if low == INT64_NULL:  # the smallest of all
            values = values[values != INT64_NULL]
            low = int(values.min()) if len(values) else 0
        found[name] = (low, int(values.max())) if len(values) else None
    return found


def _plan(statistics: ColumnStatistics, column: Column) -> _Plan:
    examples = _examples_of_id(column)
    if examples:
        return _Plan(None, (), examples=examples)
    if isinstance(statistics, CategoryStatistics):
        return _Plan(None, statistics.values[:_SHOWN])
    assert isinstance(statistics, NumberStatistics)
    each = _each_whole(column)
    if each is not None:
        return _Plan(each, (), whole=True)
    ends = np.cumsum(statistics.counts)
    if not len(ends) or ends[-1] == 0:
        return _Plan(np.asarray([0.0, 1.0]), ())
    wanted = np.searchsorted(ends, np.linspace(0, ends[-1], _BINS + 1)[1:])
    places = np.unique(np.minimum(wanted, len(ends) - 1)) + 1
    return _Plan(np.asarray([statistics.edges[0], *(statistics.edges[place] for place in places)]), ())


def _examples_of_id(column: Column) -> tuple[str | int, ...]:
    """Some values of a column whose values are all different integers or strings; nothing for any other column."""
    if column.kind not in ("int", "string"):
        return ()
    host = column.on_host()
    known = host[~host.null]
    fewest = _UNIQUE_IS_AN_ID
    if (
        column.kind == "int"
        and len(known)
        and np.abs(known.values.astype(np.float64)).max() > _EXACT_INTEGERS
    ):
        fewest = 2
    parts = (known.values[:fewest], known.values)
    if len(known) < fewest or not all(len(np.unique(values)) == len(values) for values in parts):
        return ()
    return tuple(known[:_EXAMPLES].to_arrow().to_pylist())


def _each_whole(column: Column) -> Floats | None:
    """Returns edges around every integer of the column's range, when it has only integers and the range is narrow."""
    few = column.of_entries()[column.places.seen()[0]] if isinstance(column, CodedColumn) else column
    numbers = few.values[~few.null].astype(np.float64)
    if not len(numbers):
        return None
    low, high = float(numbers.min()), float(numbers.max())
    if max(abs(low), abs(high)) > _EXACT or not high - low <= _WHOLE or (numbers != np.rint(numbers)).any():
        return None
    return np.arange(low, high + 2) - 0.5


def _count(column: Column, plan: _Plan, target: Floats, *, same: bool) -> tuple[Floats, Floats, Floats]:
    """Rows, sums and squares of the target by bin. `same`: a target is its own square."""
    if plan.edges is not None:
        bins, size = _bins(column, plan.edges), len(plan.edges)  # one bin more: nulls
    else:
        bins, size = _places(column, plan.values), len(plan.values) + 2
    null = column.null
    if null.any():
        bins = np.where(null, size - 1, bins)
    rows = np.bincount(bins, minlength=size).astype(np.float64)
    sums: Floats = np.bincount(bins, weights=target, minlength=size).astype(np.float64, copy=False)
    if same:
        return rows, sums, sums
    return rows, sums, np.bincount(bins, weights=target**2, minlength=size).astype(np.float64, copy=False)


def _bins(column: Column, edges: Floats) -> npt.NDArray[np.int64]:
    """By comparing with the edges, or, where values lie close together, once per value."""
    coded = compact(column)
    numbers = coded.entries if isinstance(coded, CodedColumn) else column.values
    places = np.searchsorted(edges[1:-1], numbers.astype(np.float64), side="right")
    return np.take(places, coded.places.rows) if isinstance(coded, CodedColumn) else places


def _places(column: Column, values: tuple[str | int, ...]) -> npt.NDArray[np.int64]:
    """Each row's place among the values; the place after them for all others."""
    if column.dictionary is None:
        found = pc.index_in(pa.array(column.values.astype(np.int64)), value_set=pa.array(values, pa.int64()))
        return np.asarray(found.fill_null(len(values)).to_numpy(zero_copy_only=False)).astype(np.int64)
    texts = pa.array([str(value) for value in values], pa.string())
    entries = pc.index_in(column.dictionary, value_set=texts).fill_null(len(values))
    return np.append(entries.to_numpy(zero_copy_only=False), len(values))[column.values].astype(np.int64)
