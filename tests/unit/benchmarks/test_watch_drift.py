"""The race against Evidently: when a drift counts as found, and what the last line says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.watch import drift_race
from benchmarks.watch.drift_race import RULES, Raced


def window(score: float, missing: float = 0.0, rows: int = 100) -> dict[str, Any]:
    return {"rows": rows, "drift": {"x": [score, 0.1]}, "missing": {"x": [missing, 0.02]}}


def test_requests_count_up_to_the_end_of_the_first_window_that_is_flagged() -> None:
    windows = [window(0.05, 0.02), window(0.2, 0.02), window(0.3, 0.02)]
    assert drift_race._first(windows, "x", None) == 200
    assert drift_race._first(windows, "x", {"x": 0.25, "missing x": 0.1}) == 300
    assert drift_race._first(windows[:1], "x", None) is None


def test_missing_values_are_flagged_beyond_a_tenth_of_the_reference() -> None:
    assert drift_race._first([window(0.0, 0.0215)], "x", None) is None
    assert drift_race._first([window(0.0, 0.023)], "x", None) == 100


def test_a_calibrated_threshold_is_beyond_every_window_without_drift() -> None:
    quiet = [window(0.2, 0.04), window(0.4, 0.01)]
    limits = drift_race._calibrate(quiet, 1.25)
    assert limits == pytest.approx({"x": 0.5, "missing x": 0.05})
    assert drift_race._quiet_alarms(quiet, None) == (2, 2)
    assert drift_race._quiet_alarms(quiet, limits) == (2, 0)


def test_the_factor_is_the_smallest_with_as_many_alarms_in_windows_it_was_not_calibrated_on() -> None:
    quiet = [{**window(score), "window": place} for place, score in enumerate((0.1, 0.24, 0.1, 0.19))]
    assert drift_race._factor(quiet, "week", 0) == 2.5
    assert drift_race._factor(quiet, "week", 1) == 2.0
    assert drift_race._factor(quiet, "week", 2) == 1.0


def test_the_last_line_counts_drifts_that_are_found_at_least_as_soon() -> None:
    week = RULES[0].name
    others = dict.fromkeys([rule.name for rule in RULES[1:]], 30.0)
    found = {
        "sooner": {"Serin": 10.0, week: 20.0, **others},
        "alone": {"Serin": 10.0, week: None, **others},
        "later": {"Serin": 30.0, week: 20.0, **others},
        "never": {"Serin": None, week: None, **others},
    }
    quiet = {rule.name: (5, 4) for rule in RULES}
    raced = Raced(false_alarms=2, held_out=1, factors={}, quiet=quiet, found=found, notes=())
    assert drift_race.last_line(raced) == {
        "false_alarms": 2.0, "held_out_alarms": 1.0, "sooner_than_evidently": 0.75, "sooner_than_defaults": 0.5,
    }  # fmt: skip
    assert "not found" in "\n".join(drift_race.table(raced))
