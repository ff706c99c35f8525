"""A value becomes a number that the training rows, or the spec, give for it. Null counts as a value.

target_encode gives the mean target of the training rows that have the value, shrunk towards the mean of all rows
(smoothing). A training row is encoded from the other folds' targets, never from its own. The fold is a hash of the row
id; in a split by group, of the group, since rows of a group are not independent. Rows that are not trained on, and
requests, are encoded from all training rows and need no target. With several classes there is one number for each: the
share of rows in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, field_validator

from serin.columns.column import array_module, beside
from serin.columns.exact import Superaccumulator, nearest_ratio
from serin.features.aggregates.aggregate import Fit
from serin.features.aggregates.exact_sums import GroupSums, GroupTable, folds_of
from serin.features.aggregates.value_counts import ValueCounts, ValueTable
from serin.features.fitted import Floats, Sample
from serin.features.operator import Operator, Source, register
from serin.features.value_table import NumbersByValue, TableEncoding
from serin.formats.schema import Kind
from serin.spec.steps.step import VALUES

Float64 = npt.NDArray[np.float64]


class TargetEncode(Operator):
    """The mean target of the training rows with the value, as if `smoothing` more rows had the mean of all."""

    name = "target_encode"
    kinds = VALUES
    folds: int = Field(default=5, ge=2, le=64)
    """The number of folds. A training row is encoded from the rows of the other folds, to avoid leaking its target."""
    smoothing: float = Field(default=20.0, ge=0, allow_inf_nan=False)
    """The number of rows with the overall mean that are added to each value's rows."""

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}_target",)

    def fit(self, source: Source) -> Fit[FittedTargetEncode]:
        sums: GroupTable = yield GroupSums(source.column, None, self.folds, source.classes)
        order = np.append(pc.sort_indices(sums.keys).to_numpy(), len(sums.keys)).astype(np.int64)
        counts, totals = sums.counts[order], sums.sums[order]
        all_counts, all_totals = counts.sum(axis=1), totals.sum(axis=1)
        whole = _smoothed(all_counts, all_totals, self.smoothing)
        apart = [
            _smoothed(all_counts - counts[:, fold], all_totals - totals[:, fold], self.smoothing)
            for fold in range(self.folds)
        ]
        table = NumbersByValue(sums.keys.take(pa.array(order[:-1])), whole)
        return FittedTargetEncode(
            column=source.column, kind=source.kind, table=table, out_of_fold=np.stack(apart)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedTargetEncode(TableEncoding):
    """`out_of_fold`: per fold, the values of its own rows; known only while the dataset is built, and never written."""

    out_of_fold: npt.NDArray[np.float32] | None = None  # [folds, keys + 2, outputs]

    def outputs(self) -> tuple[str, ...]:
        count = self.table.numbers.shape[1]
        name = f"{self.column}_target"
        return (name,) if count == 1 else tuple(f"{name}_{label}" for label in range(count))

    def transform(self, sample: Sample) -> tuple[Floats, ...]:
        places = self.table.places(sample.columns[self.column])
        xp = array_module(places)
        numbers = xp.asarray(self.table.numbers)[places]
        if sample.training:
            assert self.out_of_fold is not None, (
                "fitted elsewhere: this plan can serve, not make training rows"
            )
            assert sample.fold_ids is not None
            train = slice(0, sample.training)
            folds = beside(folds_of(sample.fold_ids[train], len(self.out_of_fold)), places)
            numbers[train] = xp.asarray(self.out_of_fold)[folds, places[train]]
        return tuple(xp.ascontiguousarray(numbers[:, place]) for place in range(numbers.shape[1]))

    def describe(self) -> str:
        return f"mean target of {len(self.table.keys)} values; in training from the other folds' rows"

    def to_json(self) -> dict[str, Any]:
        return {"column": self.column, "kind": self.kind, "table": self.table.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], inner: None = None) -> FittedTargetEncode:  # noqa: ARG003
        table = NumbersByValue.from_json(document["table"])
        return cls(column=document["column"], kind=document["kind"], table=table)


def _smoothed(
    counts: npt.NDArray[np.int64], totals: Superaccumulator, smoothing: float
) -> npt.NDArray[np.float32]:
    """float32[keys + 2, outputs] from counts [keys + 1] and totals [keys + 1, outputs], the last row for null."""
    rows = int(counts.sum())
    every = totals.sum(axis=0)
    prior = np.asarray(
        [nearest_ratio(total, rows or 1, every.exponent) for total in every.integers(every.exponent)]
    )
    means = _shrunk_to_the_mean(counts, totals, every, rows, smoothing)
    means = np.where(counts[:, None] + smoothing > 0, means, prior.astype(np.float32))
    return np.concatenate([means[:-1], prior[None].astype(np.float32), means[-1:]]) + np.float32(0)


def _shrunk_to_the_mean(
    counts: npt.NDArray[np.int64],
    totals: Superaccumulator,
    every: Superaccumulator,
    rows: int,
    smoothing: float,
) -> npt.NDArray[np.float32]:
    """Returns (total + mean of all * smoothing) / (count + smoothing), rounded once: in float64 where its error cannot
    matter."""
    weight = counts[:, None] + smoothing
    weight = np.where(weight > 0, weight, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        own, drawn = totals.floats(), every.floats() / max(rows, 1) * smoothing
        means: Float64 = (own + drawn) / weight
        error = (2.0**-48 * (np.abs(own) + np.abs(drawn)) + 2.0**-1070) / weight
        low, high = (means - error).astype(np.float32), (means + error).astype(np.float32)
    made = np.asarray(low)
    exponent = min(totals.exponent, every.exponent)
    exact, share = every.integers(exponent), Fraction(smoothing)
    for row, place in zip(*np.nonzero(low != high), strict=True):
        total = int(totals[row, place].integers(exponent)[()])
        mean = (total + Fraction(int(exact[place]), max(rows, 1)) * share) / (int(counts[row]) + share)
        made[row, place] = nearest_ratio(mean.numerator, mean.denominator, exponent)
    return made


class CountEncode(Operator):
    """The number of training rows that have the value: 0 for an unseen one."""

    name = "count_encode"
    kinds = VALUES

    def names(self, name: str) -> tuple[str, ...]:
        return (f"{name}_count",)

    def fit(self, source: Source) -> Fit[FittedCountEncode]:
        counted: ValueTable = yield ValueCounts(source.column)
        order = counted.commonest_first()
        counts = np.append(counted.counts[order], [0, counted.nulls]).astype(np.float32)
        table = NumbersByValue(counted.values.take(pa.array(order)), counts[:, None])
        return FittedCountEncode(column=source.column, kind=source.kind, table=table)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedCountEncode(TableEncoding):
    def outputs(self) -> tuple[str, ...]:
        return (f"{self.column}_count",)

    def describe(self) -> str:
        return f"how many training rows have the value, for {len(self.table.keys)} values"


class Ordinal(Operator):
    """The position of the value in `order`, or among the sorted values of the training split. Other values are null."""

    name = "ordinal"
    kinds = VALUES
    positional = "order"
    order: tuple[str | int, ...] | None = Field(default=None, min_length=1)
    """The values in their order. By default the sorted values of the training split."""

    @field_validator("order")
    @classmethod
    def _names_each_once(cls, order: tuple[str | int, ...] | None) -> tuple[str | int, ...] | None:
        if order is not None and len(set(order)) < len(order):
            raise ValueError("`order` names a value twice")
        if order is not None and len({type(value) for value in order}) > 1:
            raise ValueError("`order` mixes strings and numbers; quote all numbers, or none")
        return order

    def misfit(self, kind: str) -> str | None:
        text = self.order is not None and isinstance(self.order[0], str)
        if self.order is None or text == (kind == "string"):
            return None
        return f"the order has {'strings' if text else 'numbers'}"

    def fit(self, source: Source) -> Fit[FittedOrdinal]:
        if self.order is not None:
            values = pa.array(list(self.order), pa.string() if source.kind == "string" else pa.int64())
        else:
            table: ValueTable = yield ValueCounts(source.column)
            values = table.values.take(pc.sort_indices(table.values))  # strings by their bytes
        return FittedOrdinal.of(source.column, source.kind, values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedOrdinal(TableEncoding):
    @classmethod
    def of(cls, column: str, kind: Kind, order: pa.Array) -> FittedOrdinal:
        places = np.append(np.arange(len(order), dtype=np.float32), np.full(2, np.nan, np.float32))
        return cls(column=column, kind=kind, table=NumbersByValue(order, places[:, None]))

    def outputs(self) -> tuple[str, ...]:
        return (self.column,)

    def describe(self) -> str:
        order = self.table.keys
        shown = ", ".join(map(str, order[:6].to_pylist())) + (", ..." if len(order) > 6 else "")
        return f"place among {len(order)} values ({shown}); others are null"

    def to_json(self) -> dict[str, Any]:
        of = "string" if pa.types.is_string(self.table.keys.type) else "int"
        return {"column": self.column, "kind": self.kind, "of": of, "order": self.table.keys.to_pylist()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any], inner: None = None) -> FittedOrdinal:  # noqa: ARG003
        type_ = pa.string() if document["of"] == "string" else pa.int64()
        return cls.of(document["column"], document["kind"], pa.array(document["order"], type_))


register(CountEncode, FittedCountEncode)
register(Ordinal, FittedOrdinal)
register(TargetEncode, FittedTargetEncode)
