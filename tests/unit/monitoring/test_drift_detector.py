"""The drift detector: what it finds, also in simulated traffic, and what an alarm says to people."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.watch.flights_weeks import DRIFTS, Flights, as_table, drifted, learn, load, resampled_counts
from benchmarks.watch.shift_table import minutes_until_alarm
from serin.columns.bins import count_rows
from serin.formats.drift import DriftStatistics, Segment
from serin.formats.importance import ColumnImportance, Importance
from serin.formats.reason import Reason
from serin.monitoring.drift.detector import Alarm, BinShift, DriftDetector, Findings
from serin.monitoring.drift.read import drift_alert, priority_of
from tests.fakes.drift import category_column, series_of, statistics_of
from tests.soak.drift import minutes_until_found, world_alarms
from tests.soak.drift_worlds import HOUR, World
from tests.soak.drift_worlds import learn as learn_world

SHARE = (0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0)  # a, b, c, d, other known values, unseen, null
START = 1_700_000_040


def one_column(**facts: Any) -> DriftStatistics:
    return statistics_of([category_column("carrier", "abcd")], [series_of(0, SHARE, **facts)])


def traffic(share: Any, minutes: int, *, rows: int = 200, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).multinomial(rows, share, minutes)


def watch(detector: DriftDetector, counts: Any, start: int = START, step: int = 60) -> Findings:
    return detector.observe(start + step * np.arange(len(counts)), counts)


def test_traffic_like_training_raises_no_alarm() -> None:
    assert watch(DriftDetector(one_column()), traffic(SHARE, 10_000)) == Findings()


def test_a_model_trained_on_busy_days_raises_no_alarm_when_there_are_few_rows() -> None:
    busy = replace(series_of(0, SHARE), capped=SHARE, floored=SHARE, block_rows=(1e6,) * len(SHARE))
    statistics = statistics_of([category_column("carrier", "abcd")], [busy])
    assert watch(DriftDetector(statistics), traffic(SHARE, 3000)) == Findings()


def test_a_large_shift_takes_a_few_blocks() -> None:
    moved = (0.1, 0.6, 0.2, 0.1, 0.0, 0.0, 0.0)
    [alarm] = watch(
        DriftDetector(one_column()), np.concatenate([traffic(SHARE, 100), traffic(moved, 30)])
    ).alarms
    assert alarm.at <= START + 108 * 60


@pytest.mark.parametrize("days", [1, 1000])
def test_a_shift_within_tolerance_is_no_drift_however_many_rows_there_are(days: int) -> None:
    shifted = (0.405, 0.295, 0.2, 0.1, 0.0, 0.0, 0.0)
    assert watch(DriftDetector(one_column()), traffic(shifted, 3000, rows=1000 * days)).alarms == ()


def test_an_alarm_names_column_bins_then_now_and_since_when() -> None:
    detector = DriftDetector(one_column())
    moved = (0.4, 0.2, 0.2, 0.1, 0.0, 0.1, 0.0)
    [alarm] = watch(detector, np.concatenate([traffic(SHARE, 500), traffic(moved, 100)])).alarms
    first = alarm.bins[0]
    assert (alarm.column, first.label, first.direction) == ("carrier", "unseen values", "more")
    assert (first.then, first.now, first.beyond) == pytest.approx((0, 0.1, 0.09), abs=0.02)
    assert alarm.size == pytest.approx(first.beyond)
    assert alarm.since == START + 500 * 60
    assert alarm.at <= START + 530 * 60
    assert alarm.rows <= 30 * 200


def test_a_category_that_vanishes_is_named_as_less() -> None:
    detector = DriftDetector(one_column())
    gone = (0.45, 0.33, 0.22, 0.0, 0.0, 0.0, 0.0)
    [alarm] = watch(detector, np.concatenate([traffic(SHARE, 300), traffic(gone, 200)])).alarms
    assert ("d", "less", 0.0) in [(shift.label, shift.direction, shift.now) for shift in alarm.bins]
    assert abs(alarm.since - (START + 300 * 60)) <= 10 * 60


def test_a_column_is_quiet_after_its_alarm_until_it_is_back() -> None:
    detector = DriftDetector(one_column())
    moved = (0.2, 0.3, 0.2, 0.3, 0.0, 0.0, 0.0)
    found = watch(detector, traffic(moved, 2000))
    assert (len(found.alarms), found.recoveries) == (1, ())
    later = watch(detector, traffic(SHARE, 60), START + 2000 * 60)
    assert later.alarms == ()
    assert [each.column for each in later.recoveries] == ["carrier"]
    assert len(watch(detector, traffic(moved, 100), START + 3000 * 60).alarms) == 1


def test_missing_traffic_is_no_drift() -> None:
    detector = DriftDetector(one_column(block="day"))
    for week in range(10):  # three days of traffic, then none
        start = START + week * 604_800
        counts = traffic(SHARE, 72, rows=50, seed=week)
        assert watch(detector, counts, start, step=3600) == Findings()


def test_few_rows_make_a_block_longer() -> None:
    detector = DriftDetector(one_column())
    lonely = np.eye(7, dtype=int)[np.random.default_rng(0).choice(7, 2000, p=SHARE)]
    assert watch(detector, lonely) == Findings()
    assert len(watch(detector, np.tile(np.eye(7, dtype=int)[5], (4000, 1)), START + 10**6).alarms) == 1


def test_new_values_after_a_pause_began_after_it_although_a_block_was_open() -> None:
    detector = DriftDetector(one_column())
    watch(detector, traffic(SHARE, 100, rows=200))
    watch(detector, traffic(SHARE, 1, rows=50), START + 100 * 60)  # too few rows to end the block
    later, unseen = START + 110 * 60, (0.2, 0.2, 0.1, 0.0, 0.0, 0.5, 0.0)
    [alarm] = watch(detector, traffic(unseen, 60), later).alarms
    assert alarm.bins[0].label == "unseen values"
    assert alarm.since == later


def test_a_clock_that_is_set_back_does_not_judge_the_same_time_twice() -> None:
    ahead, plain = DriftDetector(one_column()), DriftDetector(one_column())
    counts = traffic((0.3, 0.3, 0.2, 0.2, 0, 0, 0), 12)
    watch(ahead, counts, START)
    watch(plain, counts, START)
    before = ahead.levels()
    assert watch(ahead, counts, START - 1200) == Findings()  # twenty minutes back
    assert ahead.levels() == before == plain.levels()


def test_a_clock_that_was_a_year_ahead_does_not_stop_the_watch() -> None:
    detector = DriftDetector(one_column())
    watch(detector, traffic(SHARE, 10), START + 365 * 86_400)
    moved = (0.2, 0.3, 0.2, 0.3, 0.0, 0.0, 0.0)
    [alarm] = watch(detector, traffic(moved, 100), START).alarms
    assert START <= alarm.since <= alarm.at


def test_a_detector_continues_exactly_from_its_state() -> None:
    statistics = one_column()
    moved = (0.36, 0.3, 0.2, 0.1, 0.0, 0.0, 0.04)
    counts = np.concatenate([traffic(SHARE, 50), traffic(moved, 80), traffic(SHARE, 60)])
    whole, found = DriftDetector(statistics), []
    expected = [watch(whole, counts[[place]], START + 60 * place) for place in range(len(counts))]
    state: dict[str, Any] | None = None
    for place in range(len(counts)):
        resumed = DriftDetector.resume(statistics, state)
        found.append(watch(resumed, counts[[place]], START + 60 * place))
        state = json.loads(json.dumps(resumed.state()))
    assert found == expected
    assert sum(len(each.alarms) for each in found) == 1
    assert sum(len(each.recoveries) for each in found) == 1
    assert state == whole.state()


def test_a_state_of_other_statistics_is_not_continued() -> None:
    detector = DriftDetector(one_column())
    watch(detector, traffic((0.3, 0.3, 0.2, 0.2, 0, 0, 0), 12))
    fresh = DriftDetector.resume(one_column(tolerance=0.02), detector.state())
    assert fresh.levels() == [0.0]


def test_the_state_of_many_columns_is_small() -> None:
    columns = [category_column(f"c{place}", [str(each) for each in range(20)]) for place in range(40)]
    series = [series_of(place, (0.05,) * 20 + (0.0,) * 3, weight=1 / 40) for place in range(40)]
    detector = DriftDetector(statistics_of(columns, series))
    random = np.random.default_rng(0)
    counts = np.concatenate(
        [random.multinomial(200, (0.05,) * 20 + (0.0,) * 3, 50) for _ in range(40)], axis=1
    )
    watch(detector, counts)
    assert len(json.dumps(detector.state())) < 200_000


@pytest.mark.parametrize(("everywhere", "segments"), [(False, ("origin=JFK",)), (True, ())])
def test_a_shift_is_named_with_its_segment_unless_every_segment_has_it(
    everywhere: bool, segments: tuple[str, ...]
) -> None:
    columns = [category_column("carrier", "abcd"), category_column("origin", ["JFK", "LGA"])]
    part = [Segment(column=1, category=place) for place in (0, 1)]
    series = [
        series_of(0, SHARE, weight=0.5),
        *(series_of(0, SHARE, weight=0.25, segment=segment) for segment in part),
    ]
    detector = DriftDetector(statistics_of(columns, series))
    moved = (0.3, 0.3, 0.2, 0.2, 0.0, 0.0, 0.0)
    jfk, lga = traffic(moved, 300), traffic(moved if everywhere else SHARE, 300, seed=1)
    [alarm] = watch(detector, np.concatenate([jfk + lga, jfk, lga], axis=1)).alarms
    assert (alarm.column, alarm.segments) == ("carrier", segments)


STATISTICS = statistics_of([category_column("carrier", ["AA"])], [series_of(0, (0.5, 0.5, 0.0, 0.0))])
GONE = BinShift(bin=0, label="AA", direction="less", then=0.1234, now=0.0, tolerance=0.01, beyond=0.1134)
NEW = BinShift(
    bin=2, label="unseen values", direction="more", then=0.0, now=0.0001, tolerance=0.01, beyond=0.0
)


def alarm(**facts: object) -> Alarm:
    usual = {
        "series": 0, "column": "carrier", "source": "request", "segments": (), "bins": (GONE, NEW), "size": 0.1,
        "since": 1_800_000_000.0, "at": 1_800_000_600.0, "rows": 2000,
    }  # fmt: skip
    return Alarm(**{**usual, **facts})  # type: ignore[arg-type]


def importance(**losses: float) -> Importance:
    columns = tuple(
        ColumnImportance(column=name, source="request", loss=loss, low=loss, high=loss)
        for name, loss in losses.items()
    )
    return Importance(metric="auc", value=0.9, rows=10, repeats=1, seed=0, columns=columns)


def test_an_alert_names_then_now_since_and_the_segment() -> None:
    found = drift_alert(
        "flights",
        "flights-v3",
        alarm(segments=("origin=JFK", "origin=LGA")),
        STATISTICS,
        importance(carrier=0.2),
    )
    assert found.title == "carrier drifted where origin=JFK or origin=LGA (AA from 12.3% to 0% of rows)"
    assert found.text == (
        "Since 2027-01-15 08:00 UTC: the share of AA is 0%, 12.3% in training (tolerance 1%); also unseen values "
        "from 0% to <0.05%. Seen after 2,000 rows, at 2027-01-15 08:10 UTC. Only where origin=JFK or origin=LGA. "
        "Importance: number 1 of 1 columns. To look: `serin drift flights`, `serin captures show flights`. To retrain "
        "on newer rows: `serin run SPEC`. To go back: `serin rollout rollback flights`."
    )
    assert json.loads(json.dumps(found.facts))["segments"] == ["origin=JFK", "origin=LGA"]


def test_an_alert_quotes_values_that_training_never_had() -> None:
    found = drift_alert("flights", "flights-v3", alarm(examples=("XY", "it's")), STATISTICS, None)
    assert "Values that training never had, for example: 'XY', \"it's\". Seen after" in found.text
    assert found.facts["examples"] == ["XY", "it's"]


@pytest.mark.parametrize(
    ("losses", "rank", "severity"),
    [
        ({"carrier": 0.2, "dest": 0.1}, 1, "ticket"),
        ({"carrier": 0.001, "dest": 0.1}, 2, "info"),
        ({"carrier": -0.1, "dest": -0.2}, 1, "ticket"),  # nothing matters: nothing can be left out
        ({"dest": 0.1}, None, "ticket"),
    ],
)
def test_priority_follows_importance(losses: dict[str, float], rank: int | None, severity: str) -> None:
    priority = priority_of("carrier", importance(**losses))
    assert (priority.rank, priority.severity) == (rank, severity)


def test_scores_are_never_of_low_priority() -> None:
    found = drift_alert("flights", "flights-v3", alarm(column="score", source="score"), STATISTICS, None)
    assert found.severity == "ticket"
    assert found.title.startswith("the scores drifted (")


def test_the_event_of_an_alert_becomes_the_reason_of_a_version() -> None:
    found = drift_alert("flights", "flights-v3", alarm(), STATISTICS, None)
    body = {
        "title": found.title,
        "text": found.text,
        "since": found.since,
        "fired": 1.8e9 + 700,
        "release": "flights-v3",
    }
    reason = Reason.of_event("drift", body, now=1.8e9 + 900)
    assert reason.text == "carrier drifted (AA from 12.3% to 0% of rows) since 2027-01-15 08:00 UTC"
    assert (reason.noticed, reason.release) == (1.8e9 + 700, "flights-v3")


@pytest.fixture(scope="module")
def flights() -> Flights:
    return load()


@pytest.fixture(scope="module")
def statistics(flights: Flights) -> DriftStatistics:
    return learn(flights)


def test_counts_of_all_series_at_once_are_those_of_one_after_the_other(statistics: DriftStatistics) -> None:
    detector = DriftDetector(statistics)
    detector.open_counts[:] = np.random.default_rng(3).integers(0, 50, len(detector.open_counts))
    found = detector.hits()
    for place, series in enumerate(statistics.series):
        own = slice(detector.first_bin[place], detector.first_bin[place] + len(series.share))
        counts, column = detector.open_counts[own], statistics.columns[series.column]
        assert found[own].tolist() == (column.cumulated(counts) if series.quick else counts).tolist()
    assert len(detector.summed) > 0


def test_weeks_drawn_again_from_training_raise_no_alarm(
    flights: Flights, statistics: DriftStatistics
) -> None:
    """One a year is stated. None in two years is seen in 5% of the runs of a detector with 1.5 a year, and `make soak`
    counts in 1,000 weeks."""
    counts = resampled_counts(flights, statistics, 104, seed=0)
    assert DriftDetector(statistics).observe(counts.starts, counts.counts).alarms == ()


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
