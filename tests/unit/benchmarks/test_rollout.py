from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.rollout.benchmark import cells, key_figures, tables
from benchmarks.rollout.peers import Flagger, Kayenta, PerRequest
from benchmarks.rollout.promotion import EQUAL, seconds_to_promote
from benchmarks.rollout.scenarios import LASTING, NULLS, PRICE, WORSE
from benchmarks.rollout.simulate import Cell, simulate


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
