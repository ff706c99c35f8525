"""windows.json: how the windows of a served model are computed from events (docs/how-to/online-windows.md).

A dataset and a bundle hold it where the spec has windows with `source: online`. Beside it is history/<n>.parquet, one
file for each window: all rows of a few keys in the order of arrival, with what the ETL computed for them.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serin.formats.schema import ONLINE, InputColumn, Kind
from serin.machine.documents import canonical, read_facts, write_facts
from serin.machine.typed_json import Document

FILE, HISTORY = "windows.json", "history"
ARRIVAL, ROW = "__arrival", "__row"  # columns of the history that no table can have
MOST_EVENTS = 4096  # that are kept of one key


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineColumn:
    """One column of a window. `column`: what it is made of, None for count(). `kind`: of the result."""

    function: str
    column: str | None
    back: int
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineWindow:
    """The events of one key whose times are in [t - delay - span, t - delay), in microseconds."""

    by: tuple[str, ...]
    span_us: int
    delay_us: int
    columns: dict[str, OnlineColumn]

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns whose values are kept with an event, in the order in which they are stored."""
        found = {each.column for each in self.columns.values() if each.column is not None}
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan(Document, form="serin.windows"):
    """`inputs`: the columns of an event. `dropped`: those of them that the model does not take."""

    time: str
    id: str
    max_late_us: int
    max_future_us: int
    unavailable: Literal["refuse", "nulls"]
    inputs: tuple[InputColumn, ...]
    dropped: tuple[str, ...]
    windows: tuple[OnlineWindow, ...]

    @property
    def kinds(self) -> dict[str, Kind]:
        return {column.name: column.kind for column in self.inputs}

    @property
    def made(self) -> dict[str, OnlineColumn]:
        """The columns that are added to a request."""
        return {name: column for window in self.windows for name, column in window.columns.items()}

    @property
    def keys(self) -> list[tuple[str, ...]]:
        """The columns of each key that windows are by, each key once."""
        return sorted({tuple(sorted(window.by)) for window in self.windows})

    def sent(self, inputs: Sequence[InputColumn]) -> tuple[InputColumn, ...]:
        """What clients send of a model with these inputs: also the columns that only events have, and no windows."""
        only = [column for column in self.inputs if column.name in self.dropped]
        return (*(column for column in inputs if column.source != ONLINE), *only)

    def keep_us(self, window: OnlineWindow) -> int:
        """How long an event is kept: as long as a row that arrives in time may see it, on a host whose clock is behind
        by no more than `max_future`."""
        return self.max_late_us + window.delay_us + window.span_us + self.max_future_us

    def mark(self, window: OnlineWindow) -> bytes:
        """Eight bytes that differ between windows that keep different events. Versions of a model whose windows are
        defined alike share what is kept."""
        kinds = self.kinds
        names = (self.time, self.id, *window.by, *window.reads)
        facts: Mapping[str, Any] = {
            "columns": [[name, kinds[name]] for name in names],
            "by": len(window.by),
            "us": [window.span_us, window.delay_us, self.max_late_us, self.max_future_us],
        }
        return hashlib.blake2b(canonical(facts), digest_size=8).digest()


def write_windows(folder: Path, plan: WindowPlan) -> None:
    write_facts(folder / FILE, plan.to_json())


def history_file(folder: Path, window: int) -> Path:
    return folder / HISTORY / f"{window}.parquet"


def copy_windows(source: Path, target: Path) -> None:
    """Copies the plan and the history of a dataset, if there are any."""
    if (source / FILE).is_file():
        shutil.copyfile(source / FILE, target / FILE)
        shutil.copytree(source / HISTORY, target / HISTORY)


def read_windows(folder: Path) -> WindowPlan | None:
    """The plan of a dataset or bundle; None when it has no windows that are computed while it is served."""
    path = folder / FILE
    return read_facts(path, WindowPlan.from_json) if path.is_file() else None
