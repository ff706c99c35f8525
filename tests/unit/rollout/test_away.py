"""Seconds in which one release had to answer for another, and what a candidate can not hide behind."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from serin.evidence.histogram import quantile_bins
from serin.formats.serving.request import Request
from serin.rollout.decide.blocks import Block, columns, cut
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Verdict
from serin.rollout.decide.verdict import judge_step
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic, changed

T = 1000.0
PLAN = Plan(slo_ms=100.0, deadline_s=600.0)
ARM = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=0.5, since=3)


def folded(requests: list[Request], *, plan: Plan = PLAN, share: float = 0.5) -> Evidence:
    return fold(Evidence(), requests, arm=replace(ARM, share=share), plan=plan, now=None)


def saved(line: Request) -> Request:
    return line._replace(attempts=2)


def some(share: float, *arms: str) -> Callable[[Request], bool]:
    """By lot, this share of these arms' requests."""
    draw = np.random.default_rng(5)
    return lambda line: line.arm in arms and bool(draw.random() < share)


def without_stable(requests: list[Request], since: float, till: float) -> list[Request]:
    """Stable is dead for a while: the candidate answers for it, and has the work of both."""
    return changed(
        requests,
        lambda line: since <= line.t < till,
        lambda line: line._replace(us=300_000.0, attempts=2 if line.arm == "stable" else 1),
    )


def test_requests_taken_over_from_a_dead_stable_release_are_not_judged_by_latency() -> None:
    plain = Traffic().requests(T, 40)
    usual, found = folded(plain), folded(without_stable(plain, T + 20, T + 30))
    assert usual.blocks == found.blocks
    quiet = folded([line for line in plain if not T + 20 <= line.t < T + 30])
    for name in ("p50", "p95", "p99", "not slower p50", "not slower p95"):
        assert found.worths()[name] == pytest.approx(quiet.worths()[name], rel=0.3), name
    assert (
        quantile_bins(found.memory, (0.5, 0.95)).tolist() == quantile_bins(quiet.memory, (0.5, 0.95)).tolist()
    )
    assert found.worths()["promise latency"] <= 1.0, "it did not promise to be as fast with the load of two"


def test_requests_that_were_saved_still_failed_on_their_arm() -> None:
    found = folded(without_stable(Traffic().requests(T, 40), T + 20, T + 30))
    assert found.stable.errors == found.stable_recent.errors > 300
    assert found.candidate.errors == 0
    assert found.worths()["errors"] < 1.0
    assert found.worths()["stable's promise errors"] > 20


def test_a_few_saved_requests_do_not_hide_a_slow_candidate() -> None:
    saved = changed(
        Traffic(slower=3.0).requests(T, 40),
        lambda line: line.id.endswith("77"),
        lambda line: line._replace(attempts=2),
    )
    assert folded(saved).stable.errors > 10
    assert folded(saved).worths()["p50"] > 100


@pytest.mark.parametrize("last", [False, True])
def test_no_step_passes_while_the_stable_release_loses_its_requests_to_the_candidate(last: bool) -> None:
    """Whose latency cannot be judged then: it may be as slow as it likes."""
    requests = changed(Traffic(slower=5.0).requests(T, 60), some(0.4, "stable"), saved)
    evidence = folded(requests)
    assert evidence.compared == 0
    assert evidence.candidate.requests > 2000
    verdict, reason = judge_step(PLAN, evidence, elapsed_s=60, last=last)
    assert verdict is Verdict.WAIT
    assert reason.startswith("0 of 100 requests are compared (")
    assert f"; {evidence.blocks} s do not count: one release took over more than a tenth" in reason
    assert judge_step(PLAN, evidence, elapsed_s=600, last=last)[0] is Verdict.INCONCLUSIVE


def test_no_step_passes_while_both_releases_lose_their_requests_to_each_other() -> None:
    evidence = folded(changed(Traffic().requests(T, 60), some(0.4, "stable", "candidate"), saved))
    assert judge_step(PLAN, evidence, elapsed_s=60, last=False)[0] is Verdict.WAIT
    assert judge_step(PLAN, evidence, elapsed_s=600, last=False)[0] is Verdict.INCONCLUSIVE


def test_a_candidate_that_loses_its_own_requests_fails_whatever_it_may() -> None:
    """Void for latency are its seconds by its own doing; its failures are none the less."""
    plan = replace(PLAN, max_error_share=1.0)
    evidence = folded(changed(Traffic().requests(T, 30), some(0.15, "candidate"), saved), plan=plan)
    assert evidence.void_s > 10
    verdict, reason = judge_step(plan, evidence, elapsed_s=30, last=False)
    assert verdict is Verdict.FAIL
    assert reason.startswith("it fails more often than the stable version; ")


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.8])
def test_arms_that_are_saved_alike_make_a_second_void_equally_often(share: float) -> None:
    """Else what is left of the seconds would speak for one of them: the one whose slow requests made theirs void."""
    lost = [0, 0]
    for seed in range(80):
        requests = Traffic(requests_per_s=100, share=share).requests(T, 1, seed=seed)
        block = _block(changed(requests, _lot(0.03, seed), saved), share)
        sizes = (int(block.bins[3].sum()), int(block.bins[2].sum()))
        for arm in (0, 1):
            lost[arm] += block.equal_saved[arm] > 0.1 * sizes[arm]
        assert block.void >= any(block.equal_saved[arm] > 0.1 * sizes[arm] for arm in (0, 1))
    assert abs(lost[0] - lost[1]) < 4 * np.sqrt(sum(lost) + 1), lost


def test_a_baseline_that_is_away_makes_a_second_void_and_excuses_the_candidate_from_nothing() -> None:
    plan = replace(PLAN, baseline=True)
    draw = np.random.default_rng(7)
    requests = [
        line._replace(arm="baseline", release=f"{STABLE}-baseline", attempts=2)
        if line.arm == "stable" and draw.random() < 0.05 / 0.95
        else line
        for line in Traffic(requests_per_s=200, share=0.05, slower=100.0).requests(T, 30)
    ]
    evidence = folded(requests, plan=plan, share=0.05)
    assert evidence.compared < 20
    verdict, reason = judge_step(plan, evidence, elapsed_s=30, last=False)
    assert verdict is Verdict.FAIL
    assert "of its requests take longer than" in reason.split(";")[0]


def _block(requests: list[Request], share: float) -> Block:
    return cut(columns(requests, candidate=CANDIDATE, stable=STABLE), {3: share}, PLAN)


def _lot(share: float, seed: int) -> Callable[[Request], bool]:
    draw = np.random.default_rng(seed)
    return lambda line: bool(draw.random() < share)
