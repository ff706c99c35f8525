"""Aggregates that a fit requests over the training rows: measured per partition and merged, exactly, in any order.

A fit is a generator: it yields an aggregate, or several in a tuple, is sent the merged results, and returns the fitted
operator. Its caller decides where the rows are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from serin.features.sample import Sample


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
    known: dict[Aggregate, Any] = {}
    answers: Any = None
    while True:
        try:
            asked = whole.send(answers)
        except StopIteration as end:
            fitted: list[T] = end.value
            return fitted
        assert isinstance(asked, tuple)
        new = tuple(aggregate for aggregate in dict.fromkeys(asked) if aggregate not in known)
        known.update(zip(new, answer(new), strict=True) if new else ())
        answers = tuple(known[aggregate] for aggregate in asked)


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
