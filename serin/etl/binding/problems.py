"""Collects what is wrong with a spec and its tables, so that all of it is reported at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serin.errors import DataError, SerinError, SpecError

_KEY = re.compile(r"(data|features|export)[\w.\[\]-]*")


class Undetermined(Exception):
    """A question that cannot be answered because of a problem that has been collected already."""


class Problems:
    """Errors with the keys of the spec that they are about. The same error is kept once."""

    def __init__(self) -> None:
        self._found: list[tuple[str, SerinError]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, error: SerinError, key: str = "") -> None:
        if all(str(error) != str(known) for _, known in self._found):
            self._found.append((key, error))

    def include(self, others: Problems) -> None:
        for key, error in others._found:
            self.add(error, key)

    def forget(self, unwanted: Callable[[SerinError], bool]) -> None:
        self._found = [(key, error) for key, error in self._found if not unwanted(error)]

    @contextmanager
    def catching(self, key: str = "") -> Iterator[None]:
        """Collects the error that ends the block. `key`: what it is about, for errors that do not name a key."""
        try:
            yield
        except Undetermined:
            pass
        except (SpecError, DataError) as error:
            self.add(error, key)

    def lines(self) -> list[tuple[str, str]]:
        """All problems as (key, what is wrong and how to fix it)."""
        lines: list[tuple[str, str]] = []
        for key, error in self._found:
            if isinstance(error, SpecError):
                lines += [(own, text) for own, text in error.problems]
                continue
            named, _, text = str(error).partition(": ")
            if text and _KEY.fullmatch(named):
                lines.append((key if key.startswith(named) else named, text))
            else:
                lines.append((key, str(error)))
        return list(dict.fromkeys(lines))

    def raise_found(self, where: str) -> None:
        """Raises the only error as it is, several as one SpecError."""
        if len(self._found) == 1:
            raise self._found[0][1]
        if self._found:
            raise SpecError(where=where, problems=self.lines())
