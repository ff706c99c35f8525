"""The drift detector on simulated and on resampled traffic; `python -m tests.soak.drift` runs much longer."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.watch.flights_weeks import DRIFTS, Flights, as_table, drifted, learn, load, resampled_counts
from benchmarks.watch.shift_table import minutes_until_alarm
from serin.columns.bins import count_rows
from serin.formats.drift import DriftStatistics
from serin.monitoring.drift.alarm import Alarm
from serin.monitoring.drift.detector import DriftDetector
from tests.soak.drift import minutes_until_found, world_alarms
from tests.soak.drift_worlds import HOUR, World
from tests.soak.drift_worlds import learn as learn_world


@pytest.fixture(scope="module")
def flights() -> Flights:
    return load()


@pytest.fixture(scope="module")
def statistics(flights: Flights) -> DriftStatistics:
    return learn(flights)


def test_weeks_drawn_again_from_training_raise_no_more_alarms_than_stated(
    flights: Flights, statistics: DriftStatistics
) -> None:
    counts = resampled_counts(flights, statistics, 200, seed=0)
    alarms = DriftDetector(statistics).observe(counts.starts, counts.counts).alarms
    assert len(alarms) <= 200 / 52


def test_a_year_with_seasons_slow_columns_and_repeated_rows_raises_no_more_alarms_than_stated() -> None:
    world = World(seed=3, rows_per_hour=40)
    alarms = world_alarms(world, learn_world(world, 53), 52, HOUR)
    assert len(alarms) <= 1


def first_alarm(
    flights: Flights, statistics: DriftStatistics, name: str, *, weeks: int
) -> tuple[Alarm, float, int]:
    """The first alarm after the change, the time of the change, and the requests that came in between."""
    rows, times, change = drifted(flights, DRIFTS[name], before=2, after=weeks, seed=1)
    counts = count_rows(statistics, as_table(rows), times)
    alarm = DriftDetector(statistics).observe(counts.starts, counts.counts).alarms[0]
    return alarm, change, int(((times >= change) & (times < alarm.at)).sum())


@pytest.mark.parametrize(
    ("name", "label", "direction", "requests", "seen"),
    [
        (
            "carrier UA (18%) disappears",
            "UA",
            "less",
            1200,
            ("origin=EWR",),
        ),  # most of its flights start there
        ("kilometres for miles", "values up to", "less", 1200, ()),
        ("30% of distances are null", "null", "more", 600, ()),
        ("a new airport (10%)", "unseen values", "more", 800, ()),
        ("departures 3 hours later at JFK", "below 500", "more", 9000, ("origin=JFK",)),
    ],
)
def test_a_drift_of_flights_is_found_and_named(
    flights: Flights,
    statistics: DriftStatistics,
    name: str,
    label: str,
    direction: str,
    requests: int,
    seen: tuple[str, ...],
) -> None:
    alarm, change, took = first_alarm(flights, statistics, name, weeks=3)
    assert (alarm.column, alarm.segments) == (DRIFTS[name].column, seen)
    assert alarm.bins[0].label.startswith(label)
    assert alarm.bins[0].direction == direction
    assert abs(alarm.since - change) <= 86_400
    assert took <= requests


def test_a_larger_move_is_found_sooner() -> None:
    found = [np.median([minutes_until_found(moved, seed) for seed in range(3)]) for moved in (0.4, 0.1, 0.05)]
    assert found == sorted(found)
    assert found[0] <= 10
    assert found[-1] <= 40


@pytest.mark.parametrize(("share", "minutes"), [(0.05, 3), (0.3, 8)])
def test_a_share_that_grows_by_30_points_is_found_within_minutes(share: float, minutes: float) -> None:
    found = [minutes_until_alarm(share, 0.3, 1000, seed) for seed in range(3)]
    assert all(each is not None and each <= minutes for each in found), found
