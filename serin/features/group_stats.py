"""Statistics of a column among the training rows with the same key, for each row that key: served by the key alone.

A key that no training row has, or null, finds null (and a count of 0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serin.features.distribution import Distribution
from serin.features.group_sums import GroupSums, GroupTable
from serin.features.number_requests import FIXED_BITS
from serin.features.requests import Fit
from serin.features.sample import Sample
from serin.features.steps import Floats
from serin.features.value_table import NumbersByValue
from serin.formats.schema import Kind
from serin.spec import steps as spec

if TYPE_CHECKING:
    from serin.features.graph import GraphBuilder


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
        exponent = data.exponent()
        sums: GroupTable = yield GroupSums(step.by, data.numbers, exponent)
        order = np.asarray(pc.sort_indices(sums.keys).to_numpy())
        unit = Fraction(2) ** (exponent - FIXED_BITS)
        rows = [[_statistic(stat, sums, int(row), unit) for stat in step.stats] for row in order]
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


def _statistic(stat: str, sums: GroupTable, row: int, unit: Fraction) -> float:
    count, total = int(sums.counts[row, 0]), int(sums.sums[row, 0, 0])
    if stat == "count":
        return float(count)
    if stat in ("min", "max"):
        return float(sums.ends[row, 0 if stat == "min" else 1])
    if stat == "sum":
        return float(total * unit)
    mean = Fraction(total, count)
    if stat == "mean":
        return float(mean * unit)
    assert stat == "std", stat
    return math.sqrt(float((Fraction(sums.squares(row), count) - mean * mean) * unit * unit))
