"""Computes the aggregates that features are fitted from, over the pieces that an engine holds; each of them once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from serin.etl.dataset.transform import Divided
from serin.etl.engines.device import gpu_aware, to_host
from serin.etl.engines.engine import Engine, Held
from serin.etl.relational.target import first_target
from serin.features.aggregates.aggregate import Aggregate
from serin.features.aggregates.counted import (
    Counted,
    answer_counted,
    counted_column,
    measure_sample,
    merge_answers,
)
from serin.features.sample import Sample


class Answers:
    """Caches answers, so that statistics cost no further pass over the rows. Where a column's values are all known with
    their counts, it computes whatever depends on these alone without a pass too."""

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


@gpu_aware
def measure(divided: Divided, aggregates: tuple[Aggregate, ...]) -> list[Any]:
    """What the aggregates ask, of this piece's training rows."""
    train = divided.span(0)
    used = dict.fromkeys(name for aggregate in aggregates for name in aggregate.columns)
    sample = Sample(
        columns={name: divided.columns[name][train] for name in used},
        fold_ids=divided.fold_ids[train],
        target=first_target(divided.target[train]),
        training=train.stop,
    )
    only_host = [aggregate for aggregate in aggregates if not getattr(aggregate, "on_gpu", False)]
    there = to_host(sample) if only_host else sample
    return [
        measure_sample(aggregate, there if aggregate in only_host else sample) for aggregate in aggregates
    ]


@dataclass(frozen=True, slots=True)
class Merge:
    """Merges what two pieces measured, one aggregate at a time."""

    aggregates: tuple[Aggregate, ...]

    def __call__(self, left: list[Any], right: list[Any]) -> list[Any]:
        return [
            merge_answers(aggregate, one, other)
            for aggregate, one, other in zip(self.aggregates, left, right, strict=True)
        ]
