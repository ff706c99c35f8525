"""Evidence of a release: what is counted, how sure it is, and how much of it was there before."""

import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from serin.errors import ReleaseNotReady
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
from serin.formats.serving.request import Request
from serin.rollout.decide.blocks import Counts, columns, cut
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import RECENT_S, Evidence, fold
from serin.rollout.decide.plan import Plan
from serin.rollout.run.background import BackgroundFleet
from serin.store.artifacts import Release
from tests.fakes.rollout import FakeFleet
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic, changed

T = 1000.0
PLAN = Plan(slo_ms=100.0, warmup_s=0.0)
ARM = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=0.5, since=3)


def request(t: float = T, **changes: Any) -> Request:
    line = Request(t, "flights", 3, "candidate", CANDIDATE, 200, None, 900.0, 1, "-", f"{t}")
    return line._replace(**changes)


def folded(requests: list[Request], before: Evidence | None = None, **changes: Any) -> Evidence:
    how: dict[str, Any] = {"arm": ARM, "plan": PLAN, "now": None}
    return fold(before or Evidence(), requests, **(how | changes))


def as_json(evidence: Evidence) -> str:
    return json.dumps(evidence.to_json())


@pytest.mark.parametrize("size", [1, 7, 250])
def test_evidence_in_pieces_through_the_journal_is_the_same_to_the_last_bit(size: int) -> None:
    requests = Traffic(requests_per_s=20, share=0.5, slower=30, errors=(0.01, 0.1)).requests(T, 12)
    pieces = Evidence()
    for first in range(0, len(requests), size):
        pieces = folded(requests[first : first + size], pieces)
        pieces = Evidence.from_json(json.loads(as_json(pieces)))
    assert as_json(pieces) == as_json(folded(requests))
    assert pieces.blocks > 8


def test_the_control_is_as_large_as_the_candidate() -> None:
    requests = Traffic(requests_per_s=1000, share=0.1).requests(T, 20)
    block = cut(columns(requests, candidate=CANDIDATE, stable=STABLE), {3: 0.1}, PLAN)
    candidate, control = int(block.bins[3].sum()), int(block.bins[2].sum())
    assert candidate == block.candidate.requests
    assert abs(candidate - control) < 4 * np.sqrt(candidate + control)
    assert block.stable.requests > 8 * control


def test_a_candidate_with_most_of_the_traffic_is_thinned_to_its_control() -> None:
    requests = Traffic(requests_per_s=1000, share=0.8).requests(T, 10)
    block = cut(columns(requests, candidate=CANDIDATE, stable=STABLE), {3: 0.8}, PLAN)
    candidate, control = int(block.bins[3].sum()), int(block.bins[2].sum())
    assert control == block.stable.requests
    assert abs(candidate - control) < 4 * np.sqrt(candidate + control)


def test_a_client_that_sends_one_id_for_all_does_not_choose_its_arm() -> None:
    requests = [line._replace(id="same") for line in Traffic(requests_per_s=1000, share=0.1).requests(T, 10)]
    block = cut(columns(requests, candidate=CANDIDATE, stable=STABLE), {3: 0.1}, PLAN)
    assert 0.07 < block.bins[2].sum() / len(requests) < 0.13


def test_all_traffic_has_no_control_and_is_not_compared() -> None:
    requests = Traffic(share=1.0, slower=5, errors=(0, 0.5)).requests(T, 10)
    block = cut(columns(requests, candidate=CANDIDATE, stable=STABLE), {3: 1.0}, PLAN)
    assert (block.bins[2:].sum(), block.equal_errors) == (0, (0, 0))
    assert block.candidate.requests == len(requests)


def test_tolerance_forgives_some_of_the_candidate_s_failures_only() -> None:
    requests = Traffic(requests_per_s=1000, errors=(1.0, 1.0)).requests(T, 4)
    block = cut(columns(requests, candidate=CANDIDATE, stable=STABLE), {3: 0.5}, Plan(error_tolerance=2.0))
    assert 0.4 < block.equal_errors[0] / block.candidate.errors < 0.6
    assert block.equal_errors[1] == block.stable.errors


@pytest.mark.parametrize(
    "other",
    [
        {"arm": "pinned"},
        {"release": "flights-v7"},
        {"arm": "stable", "release": CANDIDATE},
        {"model": "taxis", "release": "taxis-v2"},
        {"epoch": 2},
    ],
)
def test_requests_not_routed_by_weight_are_not_evidence(other: dict[str, Any]) -> None:
    assert folded([request(**other)], now=T + 60).candidate == Counts()


def test_requests_before_the_rollout_teach_what_stable_s_latency_is() -> None:
    before = [line._replace(epoch=2) for line in Traffic(share=0.0).requests(T - 10, 10)]
    evidence = folded(before)
    assert evidence.memory.sum() == len(before)
    assert (evidence.blocks, evidence.stable) == (0, Counts())


def test_failures_are_counted_by_arm_and_so_are_requests_the_client_gave_up() -> None:
    stable = request(arm="stable", release=STABLE, id="s")
    lines = [
        request(id="1"),
        request(id="2", code=503),
        request(id="3", attempts=2),
        request(id="4", code=0, us=None, flags="DC"),
        stable,
    ]
    evidence = folded(lines, now=T + 60)
    assert (evidence.candidate, evidence.stable) == (Counts(4, 2, 1), Counts(1, 0, 0))


def left(each: Request, waited_ms: float) -> Request:
    return each._replace(code=0, us=None, flags="DR", ms=waited_ms + 1.0, received_ms=1.0)


def test_clients_that_leave_early_are_neither_slow_nor_failed_and_no_request_of_an_arm() -> None:
    lines = [request(id="1"), left(request(id="2"), 3.0), left(request(id="3"), 101.0)]
    lines.append(left(request(id="4", attempts=2), 3.0))
    evidence = folded(lines, now=T + 60)
    assert evidence.candidate == Counts(3, 1, 1)
    assert evidence.split == (4, 4), "they were routed by weight"


def test_a_flood_of_clients_that_leave_says_nothing_about_a_candidate() -> None:
    flood = changed(
        Traffic().requests(T, 60),
        lambda each: zlib.crc32(each.id.encode()) % 3 > 0,
        lambda each: left(each, 0.0),
    )
    evidence = folded(flood, now=T + 120)
    assert evidence.candidate.slow == evidence.candidate.errors == 0
    quiet = folded([each for each in flood if each.us is not None], now=T + 120)
    assert evidence.worths() == quiet.worths()
    assert np.array_equal(evidence.memory, quiet.memory), "nor about stable's latency"


def test_a_slow_candidate_does_not_escape_because_its_clients_leave() -> None:
    """They wait for 5 ms, far below the promise; stable's answers take 2."""
    impatient = [
        left(each, 5.0) if each.us is not None and each.us > 5_000 else each
        for each in Traffic(slower=20).requests(T, 60)
    ]
    evidence = folded(impatient, now=T + 120)
    assert evidence.candidate.requests < 20
    assert evidence.worths()["p50"] > 1e3


def test_a_line_that_stands_in_the_log_twice_counts_once() -> None:
    assert folded([request(), request(), request(T + 0.5)], now=T + 60).candidate.requests == 2


def test_a_late_line_counts_in_the_first_block_that_is_open() -> None:
    evidence = folded([request(T), request(T + 10), request(T + 1, id="late")])
    assert sorted(evidence.open) == [T + 8, T + 10]
    assert evidence.open[int(T + 8)].candidate.requests == 1


def test_silence_closes_a_block_when_the_log_must_have_been_written() -> None:
    assert folded([request()], now=T + 3).blocks == 0
    assert folded([request()], now=T + 6).blocks == 1


def test_a_clock_that_was_set_back_does_not_stop_the_evidence() -> None:
    ahead = folded([request(T + 5000), request(T + 5001)], now=T + 6000)
    evidence = folded([request(T + 10 + i) for i in range(20)], ahead, now=T + 40)
    assert evidence.candidate.requests == 22
    assert evidence.blocks == 22


def test_a_new_step_resets_its_counts_and_keeps_the_wealth_of_its_guards() -> None:
    before = folded(Traffic(slower=3).requests(T, 20), now=T + 30)
    after = folded([], before, arm=Arm(candidate=CANDIDATE, stable=STABLE, epoch=4, share=1.0, since=3))
    assert (after.candidate, after.split, after.shares) == (Counts(), (0, 0), {3: 0.5, 4: 1.0})
    assert after.worths() == before.worths()
    assert before.worths()["p50"] > 1e3


def test_a_step_that_begins_again_forgets_promises_and_nothing_that_was_compared() -> None:
    before = folded(Traffic(slower=3, errors=(0.5, 0.5)).requests(T, 20), now=T + 30)
    after = folded([], before, arm=Arm(candidate=CANDIDATE, stable=STABLE, epoch=4, share=0.5, since=4))
    assert {name for name in before.worths() if "promise" in name} & set(after.worths()) == set()
    assert after.worths()["p50"] == before.worths()["p50"]


def test_a_late_line_of_the_step_before_is_compared_by_that_step_s_weight() -> None:
    before = folded([request(T, epoch=3)])
    arm = Arm(candidate=CANDIDATE, stable=STABLE, epoch=4, share=1.0, since=3)
    after = folded([request(T + 1, epoch=3), request(T + 2, epoch=4)], before, arm=arm, now=T + 60)
    assert after.split == (1, 1)


def test_only_the_last_seconds_of_stable_are_recent() -> None:
    stable = [
        request(float(t), arm="stable", release=STABLE, code=500 if t < T + 40 else 200)
        for t in range(int(T), int(T) + 100)
    ]
    evidence = folded(stable, now=T + 200)
    assert evidence.stable == Counts(100, 40, 0)
    assert evidence.stable_recent == Counts(RECENT_S, 0, 0)


def test_what_is_journaled_stays_small() -> None:
    evidence = folded(Traffic(requests_per_s=2000, share=0.1, spread=1.0).requests(T, 10))
    assert len(as_json(evidence)) < 40_000


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


V1 = Release(model="flights", version=1)


class SlowFleet(FakeFleet):
    """Works only while its gate is open."""

    def __init__(self) -> None:
        super().__init__(ready_after=0)
        self.gate = threading.Event()

    def start(self, release: Release) -> None:
        assert self.gate.wait(20)
        super().start(release)

    def stop(self, release: Release) -> None:
        assert self.gate.wait(20)
        super().stop(release)


@contextmanager
def background(slow: SlowFleet) -> Iterator[BackgroundFleet]:
    fleet = BackgroundFleet(slow)
    try:
        yield fleet
    finally:
        slow.gate.set()
        fleet.close()


def test_start_returns_at_once_and_is_not_repeated_in_the_meantime() -> None:
    slow = SlowFleet()
    with background(slow) as fleet:
        fleet.start(V1)
        fleet.start(V1)
        assert (fleet.state(V1), fleet.running()) == ("starting", [V1])
        slow.gate.set()
        fleet.close()
        assert (fleet.state(V1), slow.starts) == ("ready", ["flights-v1"])


def test_why_a_start_failed_is_raised_by_the_next_one() -> None:
    slow = SlowFleet()
    slow.broken.add("flights-v1")
    slow.gate.set()
    with background(slow) as fleet:
        fleet.start(V1)
        fleet.close()
        assert fleet.state(V1) == "absent"
        with pytest.raises(ReleaseNotReady, match="broken"):
            fleet.start(V1)


def test_a_release_counts_as_running_until_its_stop_is_done() -> None:
    slow = SlowFleet()
    slow.gate.set()
    slow.start(V1)
    slow.gate.clear()
    with background(slow) as fleet:
        fleet.stop(V1)
        assert fleet.running() == [V1]
        slow.gate.set()
        fleet.close()
        assert (fleet.running(), fleet.state(V1)) == ([], "absent")
