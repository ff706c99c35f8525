"""Simulated request traffic without drift: what a detector must not take for one."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from serin.export.drift.build import make_statistics
from serin.export.drift.choose_bins import Source
from serin.formats.drift import DriftStatistics
from serin.formats.wire import TrainingRows
from serin.spec.monitoring import DriftSpec

Array = np.ndarray[Any, np.dtype[Any]]
HOUR, WEEK = 3600.0, 604_800.0
FIRST = 1_699_833_600.0  # a Monday
SLOW_HOURS = 30.0  # over which weather is correlated
BURST_PER_HOUR, BURST_SHARE = 0.2 / 24, 0.3  # a client that repeats a row: how often, and of how many rows


@dataclass(slots=True, kw_only=True)
class World:
    """Hours of traffic, one after the other. Seasons of a year, daily and weekly waves, weather that changes slowly,
    columns that follow each other, values that keep being new, and clients that repeat one row for hours."""

    seed: int
    rows_per_hour: int = 120
    hour: int = 0
    weather: float = 0.0
    burst: dict[str, Any] | None = None
    burst_left: int = 0
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def weeks(self, count: int) -> Iterator[tuple[pa.Table, Array]]:
        for _ in range(count):
            hours = [self._hour() for _ in range(168)]
            yield (
                pa.table({name: np.concatenate([each[0][name] for each in hours]) for name in hours[0][0]}),
                np.concatenate([each[1] for each in hours]),
            )

    def _hour(self) -> tuple[dict[str, Array], Array]:
        random, hour = self.random, self.hour
        self.hour += 1
        day = np.sin((hour % 24) / 24 * 2 * np.pi)
        weekend = hour % 168 >= 120
        season = np.sin(hour / 8760 * 2 * np.pi)
        keep = np.exp(-1 / SLOW_HOURS)
        self.weather = keep * self.weather + np.sqrt(1 - keep**2) * random.normal()
        rows = int(random.poisson(self.rows_per_hour * (1 + 0.6 * day)))
        amount = random.gamma(2.0, 10.0, rows)
        temperature = 10 + 12 * season + 4 * day + 5 * self.weather
        columns: dict[str, Array] = {
            "amount": amount,
            "tax": amount * random.uniform(0.18, 0.2, rows),
            "temperature": np.round(temperature + random.normal(0, 1.0, rows), 1),
            "humidity": np.round(60 - 2 * self.weather + random.normal(0, 5, rows)),
            "channel": _pick(random, rows, ["web", "app", "shop"], [0.5 + 0.2 * day, 0.3, 0.2 - 0.1 * day]),
            "product": _pick(random, rows, list("abcd"), [0.4 + 0.1 * season, 0.3, 0.2 - 0.05 * season, 0.1]),
            "purpose": _pick(random, rows, ["work", "home"], [0.2, 0.8] if weekend else [0.6, 0.4]),
            "plain": _pick(random, rows, list("uvwxyz"), [0.3, 0.25, 0.2, 0.15, 0.07, 0.03]),
            "customer": np.where(
                random.random(rows) < 0.002,
                random.integers(10**6, 10**9, rows),
                random.zipf(1.3, rows) % 5000,
            ).astype(str),
            "note": np.where(random.random(rows) < (0.05 if weekend else 0.02), np.nan, amount),
        }
        if self.burst_left:
            self._repeat(columns, rows)
        elif rows and random.random() < BURST_PER_HOUR:
            self.burst = {name: values[0] for name, values in columns.items()}
            self.burst_left = int(random.integers(1, 7))
        times = np.sort(FIRST + (hour + random.random(rows)) * HOUR)
        return columns, times

    def _repeat(self, columns: dict[str, Array], rows: int) -> None:
        assert self.burst is not None
        copies = self.random.random(rows) < BURST_SHARE
        for name, value in self.burst.items():
            columns[name] = np.where(copies, value, columns[name])
        self.burst_left -= 1


def _pick(random: np.random.Generator, rows: int, values: list[str], weights: list[float]) -> Array:
    upto = np.cumsum(weights)  # as random.choice does, which checks its weights for longer than it draws
    return np.asarray(values)[np.searchsorted(upto / upto[-1], random.random(rows), side="right")]


def learn(world: World, weeks: int, **spec: Any) -> DriftStatistics:
    """The statistics of so many weeks of training."""
    parts = list(world.weeks(weeks))
    table = pa.concat_tables([part for part, _ in parts]).combine_chunks()
    rows = TrainingRows(table=table, times=np.concatenate([times for _, times in parts]), total=len(table))
    sources = [Source(name=name, field=name, source="request") for name in table.column_names]
    return make_statistics(rows, sources, segments=("channel",), spec=DriftSpec(**spec), importance={})
