"""Statistics of a column among the training rows with the same key; clients send the key alone.

A key that no training row has, or null, finds null (and a count of 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from serin.columns.exact import nearest_ratio, nearest_root
from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.exact_sums import GroupSums, GroupTable
from serin.features.fitted import Floats, Sample
from serin.features.operator import Operator, Source, register
from serin.features.value_table import NumbersByValue, StoredTable
from serin.formats.schema import Kind
from serin.spec.steps.step import NUMBERS, VALUES

if TYPE_CHECKING:
    from serin.columns.onnx_graph import GraphBuilder


Stat = Literal["mean", "std", "min", "max", "sum", "count"]


class GroupStats(Operator):
    """Statistics of the column among the training rows with the same value in the column `by`."""

    name = "group_stats"
    kinds = NUMBERS
    follows = ("raw", "numbers")
    by: str
    """The key column. Clients send it instead of the column itself."""
    stats: tuple[Stat, ...] = Field(default=("mean",), min_length=1)
    """The statistics, one feature each."""

    @property
    def served_by(self) -> tuple[str, ...]:
        return (self.by,)

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}_{stat}_by_{self.by}" for stat in self.stats)

    def misfits(self, columns: Sequence[str], kinds: Mapping[str, str]) -> Iterator[str]:
        del columns
        if kinds[self.by] not in VALUES:
            yield f"group_stats by {self.by!r}: a {kinds[self.by]} cannot be a key; use strings or integers"

    def fit(self, source: Source) -> Fit[FittedGroupStats]:
        numbers = source.distribution.numbers
        sums: GroupTable = yield GroupSums(
            self.by, numbers, squares="std" in self.stats, ends=bool({"min", "max"} & {*self.stats})
        )
        order = np.asarray(pc.sort_indices(sums.keys).to_numpy())
        columns = [_statistic(stat, sums) for stat in self.stats]
        rows = [[column[row] for column in columns] for row in order]
        nothing = [0.0 if stat == "count" else math.nan for stat in self.stats]
        table = np.asarray([*rows, nothing, nothing], np.float64).astype(np.float32) + np.float32(0)
        return FittedGroupStats(
            column=numbers.column,
            by=self.by,
            kind=source.kinds[self.by],
            stats=self.stats,
            table=NumbersByValue(sums.keys.take(pa.array(order)), table),
            exact=numbers.exact,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedGroupStats(StoredTable):
    inner: ClassVar[None] = None
    column: str  # the one the statistics are about; not needed to serve them
    by: str
    kind: Kind  # of `by`
    stats: tuple[str, ...]
    exact: bool = True
    table: NumbersByValue

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


register(GroupStats, FittedGroupStats)
