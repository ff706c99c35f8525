"""Answers what fits ask, over the pieces that an engine holds; a question is put to the pieces once."""

from __future__ import annotations

from typing import Any

from serin.etl.engine import Engine, Held
from serin.etl.transform import Merge, measure
from serin.features.requests import Request


class Answers:
    """Remembers, so that statistics can ask again for nothing."""

    def __init__(self, engine: Engine, held: Held) -> None:
        self._engine = engine
        self._held = held
        self._known: dict[Request, Any] = {}

    def __call__(self, requests: tuple[Request, ...]) -> list[Any]:
        new = tuple(request for request in requests if request not in self._known)
        if new:
            merged = self._engine.reduce(measure, Merge(new), self._held, new)
            self._known.update(zip(new, merged, strict=True))
        return [self._known[request] for request in requests]
