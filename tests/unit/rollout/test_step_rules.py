"""With what a step passes, what is too little to be worse, and what a cold candidate is forgiven: second by second."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serin.evidence.histogram import bins_of, count, slower_than, upper_us
from serin.formats.serving.request import Request
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Verdict
from serin.rollout.decide.verdict import judge_bake, judge_step
from serin.spec.load import load_spec
from serin.spec.objectives import ObjectivesSpec
from serin.spec.rollout import LatencySpec, RolloutSpec
from serin.spec.serving import ServingSpec
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic

T = 1000.0
DEMO = Path(__file__).parents[3] / "examples" / "flights" / "spec.yaml"


def plan(latency_ms: float = 50.0, latency: dict[str, Any] | None = None, **changes: Any) -> Plan:
    """As a person would ask for it."""
    spec = RolloutSpec(latency=LatencySpec(**(latency or {})), **changes)
    return Plan.from_spec(spec, ServingSpec(), ObjectivesSpec(latency_ms=latency_ms))


def judged(
    plan: Plan, requests: list[Request], share: float, *, last: bool = False
) -> Iterator[tuple[Verdict, str]]:
    """The verdict on one step at the end of each second, until it is a rollback or the requests end."""
    before = Traffic(share=0.0, epoch=2, median_ms=_median_ms(requests)).requests(T - 30, 30, seed=99)
    arm = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=share, since=3)
    evidence = fold(Evidence(), before, arm=arm, plan=plan)
    done = 0
    for second in range(1, int(max(line.t for line in requests) - T) + 1):
        until = done
        while until < len(requests) and requests[until].t < T + second:
            until += 1
        evidence = fold(evidence, requests[done:until], arm=arm, plan=plan, now=T + second)
        done = until
        found = judge_step(plan, evidence, elapsed_s=float(second), last=last)
        yield found
        if found[0] is Verdict.FAIL:
            return


def _median_ms(requests: list[Request]) -> float:
    return float(np.median([line.us or 0.0 for line in requests if line.arm == "stable"])) / 1e3


def arrived(requests: list[Request]) -> list[Request]:
    return sorted(requests, key=lambda line: line.t)


@pytest.mark.parametrize("requests_per_s", [30, 100, 300])
@pytest.mark.parametrize("seed", range(2))
def test_the_demo_s_slow_version_never_leaves_its_first_step(requests_per_s: int, seed: int) -> None:
    """Ten times slower, and beyond the promise in some requests: 61 of them were once enough to get on."""
    spec = load_spec(DEMO)
    slow = Traffic(requests_per_s=requests_per_s, share=0.1, median_ms=1.0, slower=9.7, spread=0.9).requests(
        T, 60, seed=seed
    )
    verdicts = [
        verdict
        for verdict, _ in judged(
            Plan.from_spec(spec.rollout, spec.serving, spec.objectives), arrived(slow), 0.1
        )
    ]
    assert verdicts[-1] is Verdict.FAIL
    assert Verdict.PASS not in verdicts


def test_a_step_does_not_pass_while_more_requests_are_slow_than_was_promised() -> None:
    """Both arms alike, so that nothing is to be said of the candidate; but what was promised is not kept."""
    wanted = plan(latency_ms=4.0, min_requests=50)  # of Traffic's requests 8.3% take longer
    slow = Traffic(requests_per_s=30, share=0.5).requests(T, 60, seed=3)
    found = list(judged(wanted, arrived(slow), 0.5))[30:]
    assert Verdict.PASS not in {verdict for verdict, _ in found}
    assert any("took longer than 4 ms, 6% of them may" in reason for _, reason in found)


def test_a_plan_that_asks_for_no_requests_does_not_pass_a_candidate_that_looks_worse() -> None:
    wanted = plan(min_requests=0, step_time=12.0, warmup=0.0)
    slow = Traffic(requests_per_s=20, share=0.5, slower=3.0).requests(T, 14, seed=1)
    assert Verdict.PASS not in {verdict for verdict, _ in judged(wanted, arrived(slow), 0.5)}


def test_a_slowdown_that_no_client_can_notice_is_not_worse() -> None:
    """2.3 against 1.74 ms under a promise of 50 ms."""
    larger = arrived(
        Traffic(requests_per_s=200, share=0.5, median_ms=1.74, slower=1.32, spread=0.3).requests(T, 90)
    )
    found = list(judged(plan(), larger, 0.5, last=True))
    assert found[-1][0] is Verdict.PASS, found[-1]
    off = list(judged(plan(latency={"tolerance_ms": 0.0}), larger, 0.5, last=True))
    assert off[-1][0] is Verdict.FAIL, off[-1]


@pytest.mark.parametrize("slower", [1.9, 3.0])
def test_a_slowdown_beyond_the_tolerance_is_found(slower: float) -> None:
    worse = Traffic(requests_per_s=200, share=0.5, median_ms=1.74, slower=slower, spread=0.3).requests(T, 90)
    verdicts = [verdict for verdict, _ in judged(plan(), arrived(worse), 0.5, last=True)]
    assert verdicts[-1] is Verdict.FAIL
    assert Verdict.PASS not in verdicts


def test_the_tolerance_is_2_percent_of_the_promise_and_is_shown() -> None:
    wanted = plan()
    assert (wanted.tolerance_ms, plan(latency={"tolerance_ms": 0.0}).tolerance_ms) == (1.0, 0.0)
    assert (wanted.allowed, wanted.bad) == (
        "10% or 1 ms, whichever is more",
        "20% or 2 ms, whichever is more",
    )
    assert plan(latency={"tolerance_ms": 0.0}).allowed == "10%"
    few = arrived(Traffic(requests_per_s=20, share=0.5).requests(T, 40))
    reasons = [reason for _, reason in judged(plan(min_requests=20), few, 0.5, last=True)]
    assert any("slower by at most 20% or 2 ms" in reason for reason in reasons)


@pytest.mark.parametrize("margin", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("tolerance_us", [0.0, 100.0, 2500.0])
def test_what_is_taken_off_is_the_larger_of_margin_and_tolerance_for_every_limit(
    margin: float, tolerance_us: float
) -> None:
    us = np.random.default_rng(5).lognormal(7, 1.5, 5000)
    counts = count(bins_of(us, margin=margin, tolerance_us=tolerance_us))
    for place in range(20, 300, 7):
        limit = float(upper_us(place))
        allowed = max((1 + margin) * limit, limit + tolerance_us)
        beyond = int(slower_than(counts, np.array([place]))[0])
        assert abs(beyond - (us >= allowed).sum()) <= 1, "one may lie on the limit to the last bit"
    assert bins_of(np.array([np.inf, 1.0]), margin=margin, tolerance_us=tolerance_us).tolist() == [399, 0]


@pytest.mark.parametrize("seed", range(2))
def test_a_candidate_that_is_slow_while_it_is_cold_is_not_rolled_back(seed: int) -> None:
    usual: dict[str, Any] = {"requests_per_s": 500, "share": 0.1, "median_ms": 10, "spread": 0.2}
    cold = Traffic(slower=3.0, **usual).requests(T, 9.5, seed=seed)
    warm = Traffic(**usual).requests(T + 9.5, 30, seed=seed + 10)
    found = list(judged(plan(), arrived([*cold, *warm]), 0.1))
    assert found[-1][0] is Verdict.PASS, found[-1]


def test_a_candidate_that_stays_slow_is_found_soon_after_its_warm_up() -> None:
    slow = Traffic(requests_per_s=100, share=0.1, median_ms=10, slower=2.0).requests(T, 60)
    found = list(judged(plan(), arrived(slow), 0.1))
    assert found[-1][0] is Verdict.FAIL
    assert len(found) < 45


@pytest.mark.parametrize("trouble", [{"slower": 100.0}, {"errors": (0.0, 0.5)}])
def test_cold_or_not_a_candidate_that_breaks_a_promise_is_rolled_back(trouble: dict[str, Any]) -> None:
    broken = Traffic(requests_per_s=100, share=0.1, **trouble).requests(T, 20)
    found = list(judged(plan(), arrived(broken), 0.1))
    assert found[-1][0] is Verdict.FAIL
    assert len(found) < 12, "within its warm-up and the wait for late requests"


def test_no_request_is_compared_and_no_step_passes_before_the_candidate_is_warm() -> None:
    good = arrived(Traffic(requests_per_s=500, share=0.1).requests(T, 30))
    found = list(judged(plan(step_time=0.0, min_requests=10), good, 0.1))
    passed = next(second for second, (verdict, _) in enumerate(found, 1) if verdict is Verdict.PASS)
    assert passed > 10
    assert "0 of 10 requests are compared (its first 10 s with traffic do not count, " in found[8][1]


def bake(plan: Plan, requests: list[Request], elapsed_s: float) -> tuple[Verdict, str]:
    arm = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=1.0, since=3)
    evidence = fold(Evidence(), requests, arm=arm, plan=plan, now=T + elapsed_s)
    return judge_bake(plan, evidence, elapsed_s=elapsed_s)


@pytest.mark.parametrize("steps", [(100,), (50, 100)])
def test_a_bake_without_a_request_holds(steps: tuple[float, ...]) -> None:
    assert bake(plan(steps=steps), [], 5000.0)[0] is Verdict.NO_TRAFFIC


def test_a_plan_that_asks_for_no_requests_bakes_on_time_alone() -> None:
    assert bake(plan(min_requests=0), [], 5000.0)[0] is Verdict.PASS


def test_a_bake_without_steps_before_it_waits_for_as_many_requests_as_a_step() -> None:
    few = Traffic(share=1.0, requests_per_s=1).requests(T, 60)
    assert bake(plan(steps=(100,)), few, 700.0)[0] is Verdict.WAIT
    assert bake(plan(steps=(50, 100)), few, 700.0)[0] is Verdict.PASS
    assert bake(plan(steps=(100,), min_requests=20), few, 700.0)[0] is Verdict.PASS


def test_a_bake_does_not_pass_while_more_requests_are_slow_than_was_promised() -> None:
    slow = Traffic(share=1.0, requests_per_s=20).requests(T, 30, seed=2)
    verdict, reason = bake(plan(latency_ms=4.0, bake=40.0), slow, 60.0)
    assert (verdict, "took longer than 4 ms" in reason) == (Verdict.WAIT, True)
