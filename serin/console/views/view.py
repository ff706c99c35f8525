"""A view: one page of the console, what it shows and how often that is read again; and the meters that views show."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from serin.reports.charts import Drawing
from serin.spec.roles import Access

T = TypeVar("T")
Parameters = Mapping[str, str]
Read = Callable[[Path, Parameters, Access], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class View:
    """`path`: its route; `template`: in templates/views; `section`: the entry of the navigation that is marked; `read`:
    returns what the template shows, from the stack's home and the parameters of the path and of `query`, of what
    somebody may view; `every_s`: how long the result is used, for all who may view the same; `live`: it is read again
    as long as somebody looks; `slow`: it takes long, and must not hold up other pages."""

    path: str
    template: str
    section: str
    title: str
    read: Read
    every_s: float = 2.0
    query: tuple[str, ...] = ()  # parameters that may follow the path
    live: bool = True
    slow: bool = False


def query_parameters(view: View, request: Request) -> dict[str, str]:
    """Returns the parameters after the path; one that is given several times has commas between its values."""
    asked = request.query_params
    return {name: ",".join(asked.getlist(name)) for name in view.query if name in asked}


def view_parameters(view: View, request: Request) -> dict[str, str]:
    return {**request.path_params, **query_parameters(view, request)}


@dataclass(slots=True)
class _Entry:
    """The lock makes one thread make the value while others wait for it."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    until: float = 0.0
    value: Any = None


class Recent(Generic[T]):
    """Values that were made a moment ago, by key; at most about `most`."""

    def __init__(self, most: int) -> None:
        self._lock, self._most = threading.Lock(), most
        self._entries: dict[Hashable, _Entry] = {}

    def get(self, key: Hashable, lasts_s: float, make: Callable[[], T]) -> T:
        with self._lock:
            if len(self._entries) > self._most:
                self._entries.clear()
            entry = self._entries.setdefault(key, _Entry())
        with entry.lock:
            if time.monotonic() >= entry.until:
                entry.value = make()
                entry.until = time.monotonic() + lasts_s
            value: T = entry.value
            return value

    def forget(self) -> None:
        """Makes every value be made again."""
        for entry in list(self._entries.values()):
            entry.until = 0.0


def meter(share: float, colour: str, label: str) -> str:
    """Draws a share between 0 and 1 as a bar."""
    drawing = Drawing(160, 10)
    drawing.rect(0, 2, 160, 6, "soft")
    drawing.rect(0, 2, 160 * share, 6, colour)
    return stretched(drawing, f"{share:.0%} {label}")


def stretched(drawing: Drawing, label: str) -> str:
    """Returns a drawing of bars that is as wide as its place, whatever its height."""
    return drawing.embedded(label).replace("<svg ", '<svg preserveAspectRatio="none" ', 1)
