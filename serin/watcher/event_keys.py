"""Deletes the events of online windows whose keys are those of recorded rows that are deleted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from serin.expressions import parse
from serin.formats.windows import FILE, WindowPlan
from serin.host.windows import forget_keys, keeps_events, served_plan
from serin.store.store import Store

_AT_ONCE = 1000


def known_plans(home: Path, store: Store, model: str) -> list[WindowPlan]:
    """The plans by which events of a model may be kept: the one that is served here, and those of all versions."""
    files = (store.read_file(model, version, FILE) for version in store.versions(model))
    plans = [
        served_plan(home, model),
        *(WindowPlan.load(content) for content in files if content is not None),
    ]
    return list({plan.dump(): plan for plan in plans if plan is not None}.values())


def forget_events(home: Path, model: str, where: str) -> Callable[[int, pa.Table], int]:
    """Returns what deletes the events of the keys of rows for which `where` is true; it returns 0, the number of
    labels. `kept_keys` says which windows it does not reach. Raises StateUnavailable: then the rows stay, and it is
    done again."""

    @cache
    def plans() -> list[WindowPlan]:
        return known_plans(home, Store.open(), model) if keeps_events(home) else []

    def forget(version: int, rows: pa.Table) -> int:
        del version  # versions whose windows are defined alike share events
        for plan in plans():
            for key in plan.keys:
                if _is_of(where, key) and {*key} <= {*rows.column_names}:
                    _forget(home, model, plan, rows.select(list(key)))
        return 0

    return forget


def kept_keys(home: Path, model: str, where: str, recorded: Collection[str]) -> list[str]:
    """Which events of online windows stay when the rows for which `where` is true are deleted, and why."""
    keys = sorted({key for plan in known_plans(home, Store.open(), model) for key in plan.keys})
    found = list[str]()
    for key in keys:
        reason = (
            "" if _is_of(where, key) else "the condition may hold for some events of a key and not for others"
        )
        if missing := sorted({*key} - {*recorded}):
            reason = f"{', '.join(missing)} is not recorded"
        if reason:
            values = " ".join(f"{name}=VALUE" for name in key)
            found.append(
                f"the events of windows by {', '.join(key)} stay: {reason}; use `serin events forget {model} {values}`"
            )
    return found


def _is_of(where: str, key: tuple[str, ...]) -> bool:
    """Whether all rows of a key meet the condition when one of them does: it reads nothing else. Otherwise the events
    of the key are also those of others."""
    return {*parse(where).columns} <= {*key}


def _forget(home: Path, model: str, plan: WindowPlan, rows: pa.Table) -> None:
    columns = [_values(rows[name]) for name in rows.column_names]
    keys = list(dict.fromkeys(zip(*columns, strict=True)))
    for first in range(0, len(keys), _AT_ONCE):
        part = map(list, zip(*keys[first : first + _AT_ONCE], strict=True))
        forget_keys(home, model, plan, dict(zip(rows.column_names, part, strict=True)))


def _values(column: pa.ChunkedArray) -> list[Any]:
    """As events have them: strings and integers; None for null."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    found: list[Any] = column.to_pylist()
    return [None if value == "" else value for value in found]
