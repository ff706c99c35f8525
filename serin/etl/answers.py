"""Answers what fits ask, over the pieces that an engine holds; a question is put to the pieces once."""

from __future__ import annotations

from typing import Any

from serin.etl.engine import Engine, Held
from serin.etl.transform import Merge, measure
from serin.features.counted import Counted, answer_counted, counted_column
from serin.features.requests import Request


class Answers:
    """Remembers, so that statistics can ask again for nothing; and a column's values where it knows all of them by
    how often they occur, so that whatever else depends on these alone needs no further pass over the rows."""

    def __init__(self, engine: Engine, held: Held) -> None:
        self._engine = engine
        self._held = held
        self._known: dict[Request, Any] = {}
        self._counted: dict[str, Counted] = {}

    def __call__(self, requests: tuple[Request, ...]) -> list[Any]:
        new = tuple(request for request in requests if request not in self._known)
        asked = tuple(request for request in new if counted_column(request) not in self._counted)
        if asked:
            merged = self._engine.reduce(measure, Merge(asked), self._held, asked)
            for request, answer in zip(asked, merged, strict=True):
                self._keep(request, answer)
        for request in new:
            column = counted_column(request)
            if column in self._counted:
                self._known[request] = answer_counted(request, self._counted[column])
        return [self._known[request] for request in requests]

    def _keep(self, request: Request, answer: Any) -> None:
        column = counted_column(request)
        if isinstance(answer, Counted) and column is not None:
            self._counted[column] = answer
        else:
            self._known[request] = answer
