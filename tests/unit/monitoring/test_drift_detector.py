"""The drift detector: what it finds, what it must not take for drift, and that it continues exactly."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from serin.formats.drift import DriftStatistics, Segment
from serin.monitoring.drift.detector import DriftDetector, Findings
from tests.fakes.drift import category_column, series_of, statistics_of

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


def test_a_state_with_other_stakes_keeps_what_has_alarmed() -> None:
    detector = DriftDetector(one_column())
    watch(detector, traffic((0.2, 0.3, 0.2, 0.3, 0, 0, 0), 100))
    state = json.loads(json.dumps(detector.state()))
    state["version"] = 1
    del state["arrays"]["waited"]
    state["arrays"]["log_m"] = state["arrays"]["open_counts"]  # another shape
    resumed = DriftDetector.resume(one_column(), state)
    assert resumed.quiet == detector.quiet
    assert resumed.open_counts.tolist() == detector.open_counts.tolist()


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
    before = [level.evidence for level in ahead.levels()]
    assert watch(ahead, counts, START - 1200) == Findings()  # twenty minutes back
    assert (
        [level.evidence for level in ahead.levels()] == before == [level.evidence for level in plain.levels()]
    )


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
    assert [level.evidence for level in fresh.levels()] == [0.0]


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


def test_a_shift_in_one_segment_is_named_with_it() -> None:
    columns = [category_column("carrier", "abcd"), category_column("origin", ["JFK", "LGA"])]
    part = [Segment(column=1, category=place) for place in (0, 1)]
    series = [
        series_of(0, SHARE, weight=0.5),
        *(series_of(0, SHARE, weight=0.25, segment=segment) for segment in part),
    ]
    detector = DriftDetector(statistics_of(columns, series))
    moved = (0.3, 0.3, 0.2, 0.2, 0.0, 0.0, 0.0)
    jfk, lga = traffic(moved, 300), traffic(SHARE, 300, seed=1)
    [alarm] = watch(detector, np.concatenate([jfk + lga, jfk, lga], axis=1)).alarms
    assert (alarm.column, alarm.segments) == ("carrier", ("origin=JFK",))


def test_a_shift_in_every_segment_names_none() -> None:
    columns = [category_column("carrier", "abcd"), category_column("origin", ["JFK", "LGA"])]
    part = [Segment(column=1, category=place) for place in (0, 1)]
    series = [
        series_of(0, SHARE, weight=0.5),
        *(series_of(0, SHARE, weight=0.25, segment=segment) for segment in part),
    ]
    detector = DriftDetector(statistics_of(columns, series))
    moved = (0.3, 0.3, 0.2, 0.2, 0.0, 0.0, 0.0)
    jfk, lga = traffic(moved, 300), traffic(moved, 300, seed=1)
    [alarm] = watch(detector, np.concatenate([jfk + lga, jfk, lga], axis=1)).alarms
    assert alarm.segments == ()
