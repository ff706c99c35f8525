"""Answers what fits ask, over the pieces that an engine holds; a question is put to the pieces once."""

from __future__ import annotations

from typing import Any

from serin.etl.dataset.transform import Merge, measure
from serin.etl.engines.engine import Engine, Held
from serin.features.aggregates.aggregate import Aggregate
from serin.features.aggregates.counted import Counted, answer_counted, counted_column


class Answers:
    """Remembers, so that statistics can ask again for nothing; and a column's values where it knows all of them by
    how often they occur, so that whatever else depends on these alone needs no further pass over the rows."""

    def __init__(self, engine: Engine, held: Held) -> None:
        self._engine = engine
        self._held = held
        self._known: dict[Aggregate, Any] = {}
        self._counted: dict[str, Counted] = {}

    def __call__(self, aggregates: tuple[Aggregate, ...]) -> list[Any]:
        new = tuple(aggregate for aggregate in aggregates if aggregate not in self._known)
        asked = tuple(aggregate for aggregate in new if counted_column(aggregate) not in self._counted)
        if asked:
            merged = self._engine.reduce(measure, Merge(asked), self._held, asked)
            for aggregate, answer in zip(asked, merged, strict=True):
                self._keep(aggregate, answer)
        for aggregate in new:
            column = counted_column(aggregate)
            if column in self._counted:
                self._known[aggregate] = answer_counted(aggregate, self._counted[column])
        return [self._known[aggregate] for aggregate in aggregates]

    def _keep(self, aggregate: Aggregate, answer: Any) -> None:
        column = counted_column(aggregate)
        if isinstance(answer, Counted) and column is not None:
            self._counted[column] = answer
        else:
            self._known[aggregate] = answer
