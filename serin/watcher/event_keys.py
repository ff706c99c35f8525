"""Deletes the events of online windows whose keys are those of recorded rows that are deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from serin.formats.windows import WindowPlan
from serin.host.windows import ask_windows, plans_folder

_AT_ONCE = 1000


def forget_events(home: Path, model: str) -> Callable[[int, pa.Table], int]:
    """Returns what deletes the events of the keys of rows; it returns 0, the number of labels. Where the key is not
    recorded, `unread_keys` names it. Raises StateUnavailable: then the rows stay, and it is done again."""

    def forget(version: int, rows: pa.Table) -> int:
        del version  # versions whose windows are defined alike share events
        plan = _plan(home, model)
        if plan is not None and not unread_keys(home, model, rows.column_names):
            names = sorted({name for window in plan.windows for name in window.by})
            columns = {name: _values(rows[name]) for name in names}
            keys = list(dict.fromkeys(zip(*columns.values(), strict=True)))
            for first in range(0, len(keys), _AT_ONCE):
                part = zip(*keys[first : first + _AT_ONCE], strict=True)
                ask_windows(home, "/forget", dict(zip(names, map(list, part), strict=True)), model=model)
        return 0

    return forget


def unread_keys(home: Path, model: str, recorded: list[str]) -> list[str]:
    """The key columns of a model's online windows that are not recorded."""
    plan = _plan(home, model)
    found = {name for window in plan.windows for name in window.by} if plan is not None else set[str]()
    return sorted(found - {*recorded})


def _plan(home: Path, model: str) -> WindowPlan | None:
    path = plans_folder(home) / f"{model}.json"
    return WindowPlan.load(path.read_bytes()) if path.exists() else None


def _values(column: pa.ChunkedArray) -> list[Any]:
    """As events have them: strings and integers; None for null."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    found: list[Any] = column.to_pylist()
    return [None if value == "" else value for value in found]
