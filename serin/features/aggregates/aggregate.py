"""Aggregates that a fit requests over the training rows: measured per partition and merged, exactly, in any order.

A fit is a generator: it yields an aggregate, or several in a tuple, is sent the merged results, and returns the fitted
operator. Its caller decides where the rows are. What depends on the values of one column alone is answered from its
distinct values and their counts, without reading the rows again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from serin.columns.coded import CodedColumn
from serin.columns.column import Column
from serin.features.fitted import Sample

Counts = npt.NDArray[np.int64]
_MANY = 2**18  # entries that are kept side by side before equal ones are combined
MOST = 2**20  # distinct values above which counting them saves no time


class Aggregate(Protocol):
    """An aggregate is hashable and small enough to be sent to every partition.

    With `on_gpu = True` it measures columns on a GPU; its result is on the host.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """Returns the columns it reads."""
        ...

    def measure(self, sample: Sample) -> Any:
        """Returns the aggregate of these rows: training rows only, with their ids and targets."""
        ...

    def merge(self, left: Any, right: Any) -> Any: ...


T = TypeVar("T")
Fit: TypeAlias = Generator[Aggregate | tuple[Aggregate, ...], Any, T]
Answer: TypeAlias = Callable[[tuple[Aggregate, ...]], Sequence[Any]]


def ready(fitted: T) -> Fit[T]:
    """Returns a fit that needs no aggregate."""
    yield from ()
    return fitted


def run_fits(fits: Sequence[Fit[T]], answer: Answer) -> list[T]:
    """Drives all fits together, so that one pass over the rows computes what all of them request at that moment."""
    whole = together(fits)
    answers: Any = None
    while True:
        try:
            aggregates = whole.send(answers)
        except StopIteration as end:
            fitted: list[T] = end.value
            return fitted
        assert isinstance(aggregates, tuple)
        answers = answer(aggregates)


def together(fits: Sequence[Fit[T]]) -> Fit[list[T]]:
    """Combines several fits into one, which requests at once what all of them request."""
    results: dict[int, T] = {}
    waiting: dict[int, Aggregate | tuple[Aggregate, ...]] = {}

    def advance(index: int, value: Any) -> None:
        try:
            waiting[index] = fits[index].send(value)
        except StopIteration as end:
            results[index] = end.value

    for index in range(len(fits)):
        advance(index, None)
    while waiting:
        asked, waiting = waiting, {}
        answers = iter((yield tuple(aggregate for asks in asked.values() for aggregate in _listed(asks))))
        for index, asks in asked.items():
            own = tuple(next(answers) for _ in _listed(asks))
            advance(index, own if isinstance(asks, tuple) else own[0])
    return [results[index] for index in range(len(fits))]


def _listed(asks: Aggregate | tuple[Aggregate, ...]) -> tuple[Aggregate, ...]:
    return asks if isinstance(asks, tuple) else (asks,)


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
