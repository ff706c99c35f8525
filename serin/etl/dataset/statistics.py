"""Turns the counts that features are fitted from into statistics.json; costs no further pass over the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from serin.features.aggregates.aggregate import Aggregate, Answer
from serin.features.aggregates.number_counts import Counts, HighBits
from serin.features.aggregates.value_counts import ValueCounts, ValueTable
from serin.features.numbers import Numbers
from serin.features.plan import FeaturePlan
from serin.formats.schema import Kind
from serin.formats.statistics import CategoryStatistics, ColumnStatistics, NumberStatistics

_BINS = 64
_COMMONEST = 100


def collect_statistics(plan: FeaturePlan, answer: Answer) -> dict[str, ColumnStatistics]:
    """One entry per column that features are made of; a time has none yet."""
    aggregates: dict[str, Aggregate] = {}
    kinds: Mapping[str, Kind] = plan.columns
    as_numbers = plan.number_columns
    for name, kind in kinds.items():
        if kind == "float" or name in as_numbers:
            aggregates[name] = HighBits(Numbers(column=name, kind=kind))
        elif kind != "timestamp":
            aggregates[name] = ValueCounts(name)
    answers: Sequence[object] = answer(tuple(aggregates.values())) if aggregates else ()
    found: dict[str, ColumnStatistics] = {}
    for name, counted in zip(aggregates, answers, strict=True):
        if isinstance(counted, ValueTable):
            found[name] = _categories(counted, kinds[name])
        else:
            assert isinstance(counted, np.ndarray)
            found[name] = _numbers(counted, kinds[name])
    return found


def _numbers(upper: Counts, kind: Kind) -> NumberStatistics:
    halves = np.flatnonzero(upper)
    magnitude = halves & 0x7FFF
    finite = halves[magnitude < 0x7F80]
    keys = np.where(finite & 0x8000, 0xFFFF - finite, finite | 0x8000)  # in the order of values
    order = np.argsort(keys)
    used, ends = keys[order], np.cumsum(upper[finite[order]])
    wanted = np.arange(1, _BINS + 1) * (int(ends[-1]) / _BINS)
    last = np.unique(np.minimum(np.searchsorted(ends, wanted), len(used) - 1))
    return NumberStatistics(
        kind=kind,
        rows=int(upper[halves].sum()),
        nulls=int(upper[halves[magnitude > 0x7F80]].sum()),
        edges=tuple(_lower_edges(np.concatenate([used[:1], used[last] + 1]))),
        counts=tuple(np.diff(ends[last], prepend=0).tolist()),
    )


def _lower_edges(keys: npt.NDArray[np.int64]) -> list[float]:
    """The smallest values whose sort keys start with these 16 bits."""
    bits = np.where(keys & 0x8000, (keys ^ 0x8000) << 16, (0xFFFF - keys) << 16 | 0xFFFF)
    values = bits.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.where(np.isfinite(values), values, np.finfo(np.float32).max).tolist()  # type: ignore[no-any-return]


def _categories(table: ValueTable, kind: Kind) -> CategoryStatistics:
    order = np.asarray(pc.sort_indices(table.values).to_numpy())
    order = order[np.argsort(-table.counts[order], kind="stable")][:_COMMONEST]
    total = int(table.counts.sum())
    shown = table.counts[order]
    return CategoryStatistics(
        kind=kind,
        rows=total + table.nulls,
        nulls=table.nulls,
        distinct=len(table.values),
        values=tuple(table.values.take(pa.array(order)).to_pylist()),
        counts=tuple(int(count) for count in shown),
        others=total - int(shown.sum()),
    )
