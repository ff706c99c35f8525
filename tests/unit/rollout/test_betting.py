from __future__ import annotations

import numpy as np
import pytest

from serin.evidence.e_process import bet, bet_on_share, difference, e_value, split_evidence, start
from serin.evidence.histogram import (
    BINS,
    bands_us,
    bins_of,
    count,
    quantile_bins,
    quantiles_us,
    slower_than,
    upper_us,
)

PAIRS = [(0, 0), (1, 0), (3, 1), (10, 10), (12, 3), (400, 350), (5000, 0)]


@pytest.mark.parametrize(("candidate", "control"), PAIRS)
def test_changing_the_arms_changes_the_sign_and_nothing_else(candidate: int, control: int) -> None:
    one = difference(np.array(candidate), np.array(control))
    other = difference(np.array(control), np.array(candidate))
    assert one == -other
    assert -1 <= one <= 1


def test_wealth_without_a_bet_is_the_initial_one() -> None:
    assert e_value(start()) == 1
    assert e_value(bet(start(), np.array(0.0))) == 1


def test_a_fair_bet_reaches_a_hundred_in_at_most_one_of_a_hundred_rollouts() -> None:
    random, runs = np.random.default_rng(1), 5000
    log_wealth, best = start(runs), np.ones(runs)
    for _ in range(300):
        outcome = difference(random.poisson(3.0, runs), random.poisson(3.0, runs))
        log_wealth = bet(log_wealth, outcome)
        best = np.maximum(best, e_value(log_wealth))
    assert (best >= 100).mean() <= 0.01
    assert (best >= 10).mean() <= 0.1


def test_a_share_as_promised_wins_nothing_and_a_larger_one_does() -> None:
    random, runs = np.random.default_rng(2), 4000
    kept, broken, best = start(runs), start(runs), np.ones(runs)
    for _ in range(200):
        kept = bet_on_share(kept, random.binomial(20, 0.01, runs) / 20, 0.01)
        broken = bet_on_share(broken, random.binomial(20, 0.05, runs) / 20, 0.01)
        best = np.maximum(best, e_value(kept))
    assert (best >= 100).mean() <= 0.01
    assert (e_value(broken) >= 100).mean() > 0.99


def test_a_promise_of_none_is_broken_by_one() -> None:
    assert e_value(bet_on_share(start(), 0.0, 0.0)) == 1
    assert e_value(bet_on_share(start(), 0.001, 0.0)) > 1e9


def test_a_long_lead_does_not_overflow() -> None:
    log_wealth = start()
    for _ in range(5000):
        log_wealth = bet(log_wealth, np.array(1.0))
    assert np.isfinite(e_value(log_wealth))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_a_split_as_the_weights_say_is_believed_however_often_one_looks(share: float) -> None:
    random, false = np.random.default_rng(3), 0
    for _ in range(200):
        candidate = np.cumsum(random.random(3000) < share)
        false += any(split_evidence(int(candidate[n]), n + 1, share) >= 1000 for n in range(49, 3000, 50))
    assert false == 0


@pytest.mark.parametrize(
    ("candidate", "requests", "share"), [(0, 20, 0.5), (150, 1000, 0.1), (500, 10000, 0.05 / 1.3)]
)
def test_a_split_that_is_not_as_the_weights_say_is_found(candidate: int, requests: int, share: float) -> None:
    assert split_evidence(candidate, requests, share) >= 1000


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_nothing_is_not_a_split(share: float) -> None:
    assert split_evidence(3, 7, share) == 1


def test_quantiles_from_bins_are_those_of_the_values_up_to_a_bin() -> None:
    us = np.random.default_rng(4).lognormal(7, 1, 5000)
    counts = count(bins_of(us))
    for quantile, found in zip((0.5, 0.95, 0.99), quantiles_us(counts, (0.5, 0.95, 0.99)), strict=True):
        assert found is not None
        assert 1 <= found / np.quantile(us, quantile, method="inverted_cdf") <= np.exp(0.0401)


def test_what_is_slower_than_a_bin_s_end_is_counted_exactly() -> None:
    us = np.random.default_rng(5).lognormal(7, 1, 5000)
    limits = quantile_bins(count(bins_of(us)), (0.5, 0.9))
    found = slower_than(count(bins_of(us)), limits)
    assert found.tolist() == [(us >= end).sum() for end in upper_us(limits)]
    judged = slower_than(count(bins_of(us, margin=0.1)), limits)
    assert judged.tolist() == [(us / 1.1 >= end).sum() for end in upper_us(limits)]


def test_a_request_without_an_end_is_slower_than_any_other() -> None:
    assert bins_of(np.array([np.inf, 0.0, 1e12])).tolist() == [BINS - 1, 0, BINS - 1]
    assert quantiles_us(np.zeros(BINS), (0.5,)) == [None]


def test_bands_hold_the_true_quantile_however_often_one_looks_and_grow_narrow() -> None:
    random, missed, wanted = np.random.default_rng(6), 0, (0.5, 0.95)
    true = [float(np.exp(7 + z)) for z in (0.0, 1.6449)]
    for _ in range(40):
        us = random.lognormal(7, 1, 2000)
        looks = [bands_us(count(bins_of(us[:n])), wanted) for n in range(50, 2001, 150)]
        missed += any(
            not low < value < high for bands in looks for value, (low, high) in zip(true, bands, strict=True)
        )
        assert looks[0][1][1] == np.inf, "fifty requests do not tell a p95"
        assert looks[-1][0][1] / looks[-1][0][0] < 1.6
    assert missed / 40 < 0.1 + 3 * np.sqrt(0.1 * 0.9 / 40), "one time in twenty for each of two quantiles"
