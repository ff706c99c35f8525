"""Statistics of a column among the training rows with the same key, for each row that key: served by the key alone.

A key that no training row has, or null, finds null (and a count of 0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.columns.rounding import nearest_ratio, nearest_root
from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.distribution import Distribution
from serin.features.aggregates.group_sums import GroupSums, GroupTable
from serin.features.aggregates.sample import Sample
from serin.features.fitted import Floats
from serin.features.value_table import NumbersByValue
from serin.formats.schema import Kind
from serin.spec import steps as spec

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStats:
    name: ClassVar[str] = "group_stats"
    inner: ClassVar[None] = None
    column: str  # the one the statistics are about; not needed to serve them
    by: str
    kind: Kind  # of `by`
    stats: tuple[str, ...]
    table: NumbersByValue
    exact: bool = True

    @classmethod
    def fit(cls, step: spec.GroupStats, data: Distribution, kind: Kind) -> Fit[GroupStats]:
        sums: GroupTable = yield GroupSums(
            step.by, data.numbers, squares="std" in step.stats, ends=bool({"min", "max"} & {*step.stats})
        )
        order = np.asarray(pc.sort_indices(sums.keys).to_numpy())
        columns = [_statistic(stat, sums) for stat in step.stats]
        rows = [[column[row] for column in columns] for row in order]
        nothing = [0.0 if stat == "count" else math.nan for stat in step.stats]
        numbers = np.asarray([*rows, nothing, nothing], np.float64).astype(np.float32) + np.float32(0)
        return cls(
            column=data.numbers.column,
            by=step.by,
            kind=kind,
            stats=step.stats,
            table=NumbersByValue(sums.keys.take(pa.array(order)), numbers),
            exact=data.numbers.exact,
        )

    @property
    def columns(self) -> Mapping[str, Kind]:
        return {self.by: self.kind}

    def outputs(self) -> tuple[str, ...]:
        return tuple(f"{self.column}_{stat}_by_{self.by}" for stat in self.stats)

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        return self.table.transform(sample.columns[self.by])

    def to_onnx(self, graph: GraphBuilder, inputs: Mapping[str, str]) -> tuple[str, ...]:
        return self.table.to_onnx(graph, inputs[self.by], self.kind)

    def describe(self) -> str:
        return f"{', '.join(self.stats)} by {self.by}, for {len(self.table.keys)} of its values"

    def to_json(self) -> dict[str, Any]:
        return {
            "column": self.column,
            "by": self.by,
            "kind": self.kind,
            "stats": list(self.stats),
            "exact": self.exact,
            "table": self.table.to_json(),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any], inner: None = None) -> GroupStats:  # noqa: ARG003
        return cls(
            column=document["column"],
            by=document["by"],
            kind=document["kind"],
            stats=tuple(document["stats"]),
            table=NumbersByValue.from_json(document["table"]),
            exact=document["exact"],
        )


def _statistic(stat: str, table: GroupTable) -> list[float]:
    """One number per key, rounded once."""
    counts: list[int] = table.counts[:-1, 0].tolist()
    if stat == "count":
        return [float(count) for count in counts]
    if stat in ("min", "max"):
        assert table.ends is not None
        ends: list[float] = table.ends[:-1, 0 if stat == "min" else 1].tolist()
        return ends
    exponent = table.sums.exponent
    if table.squares is not None:
        exponent = min(exponent, table.squares.exponent // 2)
    totals = table.sums.integers(exponent)[:-1, 0, 0].tolist()
    if stat == "sum":
        return [nearest_ratio(total, 1, exponent) for total in totals]
    if stat == "mean":
        return [nearest_ratio(total, count, exponent) for total, count in zip(totals, counts, strict=True)]
    assert stat == "std", stat
    assert table.squares is not None
    squares = table.squares.integers(2 * exponent)[:-1, 0].tolist()
    return [
        nearest_root(square * count - total**2, count**2, exponent)
        for total, square, count in zip(totals, squares, counts, strict=True)
    ]
