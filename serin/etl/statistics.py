"""Turns the counts that features are fitted from into statistics.json; costs no further pass over the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.features.number_requests import Counts, HighBits
from serin.features.numbers import Numbers
from serin.features.plan import FeaturePlan
from serin.features.requests import Answer, Request
from serin.features.value_counts import ValueCounts, ValueTable
from serin.formats.schema import Kind
from serin.formats.statistics import CategoryStatistics, ColumnStatistics, NumberStatistics

_BINS = 64
_COMMONEST = 100


def collect_statistics(plan: FeaturePlan, answer: Answer) -> dict[str, ColumnStatistics]:
    """One entry per column that features are made of; a time has none yet."""
    requests: dict[str, Request] = {}
    kinds: Mapping[str, Kind] = plan.columns
    as_numbers = plan.number_columns
    for name, kind in kinds.items():
        if kind == "float" or name in as_numbers:
            requests[name] = HighBits(Numbers(column=name, kind=kind))
        elif kind != "timestamp":
            requests[name] = ValueCounts(name)
    answers: Sequence[object] = answer(tuple(requests.values())) if requests else ()
    found: dict[str, ColumnStatistics] = {}
    for name, counted in zip(requests, answers, strict=True):
        if isinstance(counted, ValueTable):
            found[name] = _categories(counted, kinds[name])
        else:
            assert isinstance(counted, np.ndarray)
            found[name] = _numbers(counted, kinds[name])
    return found


def _numbers(upper: Counts, kind: Kind) -> NumberStatistics:
    magnitude = np.arange(65536) & 0x7FFF
    finite = np.where(magnitude < 0x7F80, upper, 0)
    ordered = np.concatenate([finite[0x8000:][::-1], finite[:0x8000]])
    used = np.flatnonzero(ordered)
    ends = np.cumsum(ordered[used])
    wanted = np.arange(1, _BINS + 1) * (int(ends[-1]) / _BINS)
    last = np.unique(np.minimum(np.searchsorted(ends, wanted), len(used) - 1))
    counts = np.diff(ends[last], prepend=0)
    edges = [_lower_edge(int(used[0])), *(_lower_edge(int(used[place]) + 1) for place in last)]
    return NumberStatistics(
        kind=kind,
        rows=int(upper.sum()),
        nulls=int(upper[magnitude > 0x7F80].sum()),
        edges=tuple(edges),
        counts=tuple(int(count) for count in counts),
    )


def _lower_edge(key: int) -> float:
    """The smallest value whose sort key starts with these 16 bits."""
    bits = (key ^ 0x8000) << 16 if key & 0x8000 else (0xFFFF - key) << 16 | 0xFFFF
    value = float(np.uint32(bits).view(np.float32))
    return value if np.isfinite(value) else float(np.finfo(np.float32).max)


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
