"""The benchmarks of rollouts and of the watch: what they simulate, and what their last lines say."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.rollout.benchmark import cells, key_figures, tables
from benchmarks.rollout.peers import Flagger, Kayenta, PerRequest
from benchmarks.rollout.promotion import EQUAL, seconds_to_promote
from benchmarks.rollout.scenarios import LASTING, NULLS, PRICE, WORSE
from benchmarks.rollout.simulate import Cell, simulate
from benchmarks.watch import drift_race
from benchmarks.watch.capture import Costs, Lap, Pair, Rush, last_line, table
from benchmarks.watch.drift_race import RULES, Raced


def test_a_candidate_twice_as_slow_is_found_and_an_equal_one_is_not() -> None:
    worse = simulate(Cell(scenario=WORSE[3], requests_per_s=50, runs=8, horizon_s=120))
    assert np.isfinite(worse["ours"]).all()
    equal = simulate(Cell(scenario=NULLS[0], requests_per_s=50, runs=8, horizon_s=120))
    assert np.isinf(equal["ours"]).all()


def test_every_scenario_can_be_simulated() -> None:
    for scenario in (*NULLS, *WORSE):
        found = simulate(Cell(scenario=scenario, requests_per_s=20, runs=2, horizon_s=61))
        assert set(found) == {"ours", "flagger", "kayenta", "per request"}
    for scenario in (*LASTING, *PRICE):
        found = simulate(Cell(scenario=scenario, requests_per_s=20, runs=2, horizon_s=12, peers=False))
        assert set(found) == {"ours"}


def test_an_equal_candidate_is_promoted_and_one_ten_times_slower_passes_no_step() -> None:
    assert np.isfinite(seconds_to_promote(runs=8)).all()
    slow = replace(EQUAL, name="x10", slower=10.0)
    assert np.isinf(seconds_to_promote(slow, requests_per_s=500, runs=8, horizon_s=100)).all()


def test_a_candidate_that_is_cold_at_first_is_not_blamed_for_it() -> None:
    (cold,) = (scenario for scenario in NULLS if scenario.cold_s)
    found = simulate(Cell(scenario=cold, requests_per_s=500, runs=100, horizon_s=40, peers=False))
    assert np.isfinite(found["ours"]).mean() <= 0.02


def test_a_second_opinion_is_asked_of_another_process() -> None:
    first, second = (
        simulate(Cell(scenario=scenario, requests_per_s=100, runs=8, horizon_s=200, peers=False))["ours"]
        for scenario in (WORSE[3], PRICE[2])
    )
    assert np.isfinite(second).all()
    assert np.median(second) > 1.5 * np.median(first)


def test_a_simulation_can_be_repeated() -> None:
    cell = Cell(scenario=WORSE[3], requests_per_s=20, runs=3, horizon_s=60)
    assert simulate(cell) == simulate(cell)


def test_flagger_goes_back_at_the_tick_after_the_fifth_failed_check() -> None:
    flagger = Flagger(1, threshold_ms=20.0)
    for minute, ms in enumerate((30.0, 10.0, np.nan, 30.0, 30.0, 30.0, 10.0), 1):
        flagger.minute(60 * minute, np.array([ms]), np.array([10.0]))
    assert flagger.decided.tolist() == [420.0]


@pytest.mark.parametrize(("slower", "decided"), [(2.0, 300.0), (1.05, np.inf)])
def test_kayenta_needs_five_points_at_98_percent(slower: float, decided: float) -> None:
    kayenta = Kayenta(1)
    for minute in range(1, 9):
        kayenta.minute(
            60 * minute, np.array([slower * (20.0 + minute / 100)]), np.array([20.0 + minute / 90])
        )
    assert kayenta.decided.tolist() == [decided]


def test_a_bet_on_each_request_wins_when_slow_ones_are_the_candidate_s_too_often() -> None:
    judge = PerRequest(2, 0.01)
    for second in range(60):
        judge.block(second, np.array([3, 1]), np.array([9, 9]), 0.1)
    assert np.isfinite(judge.decided).tolist() == [True, False]


def test_the_last_line_has_the_keys_that_are_judged() -> None:
    seconds = {
        "ours": [40.0, 50.0],
        "flagger": [360.0, 360.0],
        "kayenta": [300.0, 300.0],
        "per request": [9.0, 9.0],
    }
    never = {judge: [np.inf, np.inf] for judge in seconds}
    found = {(s.name, 100): never for s in NULLS} | {(s.name, 100): seconds for s in (*WORSE, *PRICE)}
    found |= {
        (s.name, 100): {"ours": [80.0], "flagger": [], "kayenta": [], "per request": []} for s in LASTING
    }
    found["boundary", 100] = never | {"ours": [80.0, np.inf]}
    wanted = {
        "false_rollback": 0.5,
        "sooner_than_kayenta": 300 / 45,
        "sooner_than_flagger": 8.0,
        "equal_s": 200,
    }
    assert key_figures(found, [100.0, 200.0, np.inf]) == pytest.approx(wanted)
    assert "0.5000" in tables(found)[0]


def test_full_means_two_thousand_rollouts_of_every_null_at_three_rates() -> None:
    made = [cell for cell in cells(full=True) if cell.scenario in NULLS]
    assert sum(cell.runs for cell in made) == 2000 * 3 * len(NULLS)
    assert {cell.horizon_s for cell in made} == {1800}


def _laps(*speeds: float, p99_ms: float, cpu_us: float) -> list[Lap]:
    return [
        Lap(requests_per_s=speed, p50_ms=1.0, p99_ms=p99_ms * 1000 / speed, cpu_us=cpu_us) for speed in speeds
    ]


def test_costs_are_compared_within_a_round() -> None:
    without = _laps(1000, 500, 2000, p99_ms=2.0, cpu_us=100)
    recorded = _laps(980, 490, 1960, p99_ms=2.0, cpu_us=103)
    rush = Rush(seconds=60.0, requests=9, dropped=0, fill=0.3, memory_mb=200.0)
    costs = Costs({"binary": Pair(without, recorded)}, recorder_us=30.0, requests=7, dropped=1, rush=rush)
    line = last_line(costs)
    assert round(line["binary_throughput"], 9) == 0.98
    assert round(line["capture_cost"], 9) == 0.02
    assert round(line["binary_cpu"], 9) == 1.03
    assert round(line["binary_p99_added_ms"], 3) == 0.041
    assert (line["recorder_us"], line["dropped"]) == (30.0, 1.0)
    assert "7 requests recorded, 1 dropped" in "\n".join(table(costs))


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
