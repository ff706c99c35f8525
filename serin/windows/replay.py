"""Replays a history event by event and compares the windows with those that the ETL computed, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from serin.formats.nulls import null_of
from serin.formats.schema import INT64_NULL, Kind
from serin.formats.windows import ARRIVAL, WindowPlan, history_file
from serin.windows.events import OnlineWindows, event_rows
from serin.windows.state import MemoryState

_DTYPES: dict[Kind, Any] = {"float": np.float32, "bool": np.int8, "int": np.int64, "timestamp": np.int64}


def differing(plan: WindowPlan, folder: Path) -> tuple[int, str]:
    """Replays the history of each window; how many rows there were, and the first difference, empty when there is
    none."""
    rows = 0
    for number, window in enumerate(plan.windows):
        table = pq.read_table(history_file(folder, number))
        rows += table.num_rows
        own = tuple(column for column in plan.inputs if column.name in table.column_names)
        found = replay(replace(plan, inputs=own, dropped=(), windows=(window,)), table)
        for name, column in window.columns.items():
            wanted = table.column(name).to_numpy(zero_copy_only=False)
            if problem := _difference(name, column.kind, found[name], wanted):
                return rows, problem
    return rows, ""


def replay(plan: WindowPlan, table: pa.Table) -> dict[str, list[Any]]:
    """The windows of each row of a table in wire form, whose rows are in the order of arrival."""
    windows = OnlineWindows("replay", plan, MemoryState())
    arrays = {column.name: table.column(column.name).to_numpy(zero_copy_only=False) for column in plan.inputs}
    rows, arrival = event_rows(plan.inputs, arrays), table.column(ARRIVAL).to_pylist()
    found: dict[str, list[Any]] = {name: [] for name in plan.made}
    for place, known in enumerate(arrival):
        time = rows[plan.time][place]
        if known == INT64_NULL or (time is not None and time > known + plan.max_future_us):
            answered: dict[str, list[Any]] = {name: [None] for name in found}  # a server refuses it
        else:
            row = {name: values[place : place + 1] for name, values in rows.items()}
            answered = windows.answer(row, [known]).columns
        for name, values in answered.items():
            found[name] += values
    return found


def _difference(name: str, kind: Kind, found: Sequence[Any], wanted: Any) -> str:
    """The first row whose bits differ; any NaN equals any other."""
    ours = np.asarray([null_of(kind) if value is None else value for value in found], _DTYPES[kind])
    theirs = np.asarray(wanted, _DTYPES[kind])
    same = ours == theirs
    if kind == "float":
        same = (ours.view(np.int32) == theirs.view(np.int32)) | (np.isnan(ours) & np.isnan(theirs))
    if same.all():
        return ""
    row = int(np.flatnonzero(~same)[0])
    return f"column {name!r}, row {row} of its history: {ours[row]} when it is served, {theirs[row]} in the dataset"
