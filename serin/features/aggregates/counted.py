"""Answers aggregates from a column's distinct values and their counts, without reading the rows again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from serin.columns.coded import CodedColumn
from serin.columns.column import Column
from serin.features.aggregates.aggregate import Aggregate
from serin.features.sample import Sample

Counts = npt.NDArray[np.int64]
_MANY = 2**18  # entries that are kept side by side before equal ones are combined
MOST = 2**20  # distinct values above which counting them saves no time


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """A column of numbers by value: entries, possibly repeated, and the number of rows of each."""

    entries: Column
    counts: Counts


class ByValue(Aggregate, Protocol):
    """An aggregate that depends only on the values of one column, row by row."""

    @property
    def counted(self) -> str | None:
        """Returns that column; None when the aggregate reads more."""
        ...

    def measure_counted(self, values: Counted) -> Any:
        """Returns what `measure` gives for a sample that repeats each entry as often as its count."""
        ...


def counted_column(aggregate: Aggregate) -> str | None:
    column: str | None = getattr(aggregate, "counted", None)
    return column


def count_values(column: Column) -> Counted | None:
    """The column by value, when it is stored that way."""
    if not isinstance(column, CodedColumn):
        return None
    places, counts = column.places.seen()
    return Counted(column.of_entries()[places], counts)


def measure_sample(aggregate: Aggregate, sample: Sample) -> Any:
    """Measures the aggregate, or returns the column by value where that is shorter and serves later aggregates too."""
    column = counted_column(aggregate)
    counted = None if column is None else count_values(sample.columns[column])
    return aggregate.measure(sample) if counted is None else counted


def add_counted(parts: Sequence[Counted]) -> Counted:
    """Combines the rows of all parts."""
    kind = parts[0].entries.kind
    values = np.concatenate([part.entries.values for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    if len(values) > _MANY:
        bits = values.view(f"i{values.dtype.itemsize}")  # so that NaN equals NaN
        distinct, place = np.unique(bits, return_inverse=True)
        values = distinct.view(values.dtype)
        counts = np.bincount(place, weights=counts, minlength=len(distinct)).astype(np.int64)
    return Counted(Column(kind=kind, values=values), counts)


def merge_answers(aggregate: Aggregate, left: Any, right: Any) -> Any:
    """Merges the answers of two pieces: by value as long as that is short, else as the aggregate measures."""
    if isinstance(left, Counted) and isinstance(right, Counted):
        both = add_counted([left, right])
        return both if len(both.counts) <= MOST else answer_counted(aggregate, both)
    return aggregate.merge(answer_counted(aggregate, left), answer_counted(aggregate, right))


def answer_counted(aggregate: Aggregate, answer: Any) -> Any:
    """Returns the aggregate's result, computing it where the answer is still by value."""
    if not isinstance(answer, Counted):
        return answer
    return cast("ByValue", aggregate).measure_counted(answer)
