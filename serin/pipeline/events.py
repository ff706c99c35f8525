"""Counts events of a file or of the training table for the online windows of a model."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from serin.errors import EventsUnfit, SpecError
from serin.etl.sources.files import find_files
from serin.formats.rows import read_rows
from serin.formats.schema import INT64_NULL, InputColumn, Schema
from serin.formats.windows import ROW, WindowPlan, read_windows
from serin.formats.wire import to_wire
from serin.serving.windows.pushed import read_value
from serin.spec.stored import stored_section
from serin.store.artifacts import Bundle
from serin.windows.events import event_rows, future_event

BATCH = 1000


def plan_of(bundle: Bundle) -> WindowPlan:
    """How the windows of a version are computed. EventsUnfit for one without online windows."""
    plan = read_windows(Path(bundle.path))
    if plan is None:
        reason = f"version {bundle.version} has no windows with source: online"
        raise EventsUnfit(model=bundle.model, reason=reason)
    return plan


def read_key(plan: WindowPlan, words: Sequence[str]) -> dict[str, list[Any]]:
    """The key that words like card=c7 name, as columns of one row. SpecError for words that name no key."""
    given = [each.partition("=")[::2] for each in words]
    if tuple(sorted(name for name, _ in given)) not in plan.keys:
        keys = ", or ".join(" ".join(f"{name}=VALUE" for name in key) for key in plan.keys)
        problem = f"name each column of one key once: {keys}"
        raise SpecError(where="the key", problems=[("", problem)])
    columns = {column.name: column for column in plan.inputs}
    rows: dict[str, list[Any]] = {}
    for name, text in given:
        value: Any = text
        if columns[name].kind != "string":
            with suppress(ValueError):  # a time may be text
                value = json.loads(text)
        try:
            rows[name] = [read_value(value, columns[name])]
        except ValueError as error:
            raise SpecError(
                where="the key", problems=[(name, f"{text!r} cannot be used: it {error}")]
            ) from error
    return rows


def file_events(
    plan: WindowPlan, file: Path, bundle: Bundle, outcomes: Counter[str]
) -> Iterator[dict[str, Any]]:
    """The events of a file, oldest first, in batches: `rows` by column, `arrival` None (they arrive now). Those that
    are too old are counted in `outcomes` and left out, so that they take no memory. EventRefused for a time too far in
    the future, before the first batch."""
    now = time.time_ns() // 1000
    arrays, left_out = _read(plan, [file], bundle, plan.time, now - plan.max_late_us)
    ahead = np.flatnonzero(arrays[plan.time] > now + plan.max_future_us)
    if len(ahead):
        raise future_event(plan, int(arrays[ROW][ahead[0]]), int(arrays[plan.time][ahead[0]]) - now)
    if left_out:
        outcomes["old"] += left_out * len(plan.windows)
    yield from _batches(plan, arrays, None)


def training_events(plan: WindowPlan, bundle: Bundle) -> Iterator[dict[str, Any]]:
    """The events of the main table that are not older than what is kept, in the order of arrival, each arriving when it
    did. EventsUnfit for a table whose files are not here."""
    data = stored_section(Path(bundle.path), "data")
    name, table = next(iter(data["tables"].items()))
    source = table.get("path") if isinstance(table, dict) else table
    if not source or "://" in source:
        reason = f"the files of the main table {name!r} are not here; write its newest rows to a file and push that"
        raise EventsUnfit(model=bundle.model, reason=reason)
    arrival = (data.get("events") or {}).get("arrival") or plan.time
    oldest = time.time_ns() // 1000 - max(plan.keep_us(window) for window in plan.windows)
    files = [Path(each.path) for each in find_files(name, source)]
    arrays, _ = _read(plan, files, bundle, arrival, oldest)
    yield from _batches(plan, arrays, arrival)


def _read(
    plan: WindowPlan, files: Sequence[Path], bundle: Bundle, by: str, oldest: int
) -> tuple[dict[str, Any], int]:
    """The rows whose `by`, a column with times, is not before `oldest`, each with its number, and how many others there
    are. Files are read a piece at a time."""
    more = () if by in plan.kinds else (InputColumn(name=by, kind="timestamp", dtype="INT64"),)
    schema = Schema(task="regression", inputs=(*plan.inputs, *more), outputs=())
    names = [*(column.name for column in schema.inputs), ROW]
    parts, left_out, rows = [], 0, 0
    for piece in (each for file in files for each in read_rows(file, schema, Path(bundle.path))):
        part = {name: values.reshape(-1) for name, values in to_wire(piece, schema).items()}
        part[ROW] = np.arange(rows, rows := rows + len(part[by]))
        usable = (part[by] >= oldest) | (part[by] == INT64_NULL)
        left_out += int((~usable).sum())
        if usable.any():
            parts.append({name: values[usable] for name, values in part.items()})
    found = {name: np.concatenate([part[name] for part in parts]) if parts else np.empty(0) for name in names}
    return found, left_out


def _batches(plan: WindowPlan, arrays: Mapping[str, Any], arrival: str | None) -> Iterator[dict[str, Any]]:
    """`arrival`: the column with the time at which a row became known; None: rows arrive now. As in the training table,
    a row without an arrival arrives at its time, and one that arrives too long before its time is left out."""
    times = arrays[plan.time]
    arrived = times if arrival is None else arrays[arrival]
    arrived = np.where(arrived == INT64_NULL, times, arrived)
    order = np.argsort(arrived, kind="stable")
    if arrival is not None:
        order = order[(arrived[order] != INT64_NULL) & (times[order] <= arrived[order] + plan.max_future_us)]
    for first in range(0, len(order), BATCH):
        places = order[first : first + BATCH]
        rows = event_rows(plan.inputs, {column.name: arrays[column.name][places] for column in plan.inputs})
        known = None if arrival is None else arrived[places].tolist()
        yield {"rows": rows, "arrival": known}
