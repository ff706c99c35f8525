"""Reasons that people read: how sure the evidence is, what is missing, and how long that takes at this traffic."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest

from serin.evidence.e_process import bet, e_value, seconds_until, start
from serin.formats.serving.request import Request
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.sentences import doubt, duration, not_proven
from serin.rollout.decide.verdict import Verdict, judge_step
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic

T = 1000.0
PLAN = Plan(step_s=5.0, min_requests=50, slo_ms=50.0, warmup_s=0.0)
ARM = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=0.5, since=3)


def seconds_of(traffic: Traffic, seconds: int, seed: int = 0) -> Iterator[Evidence]:
    """The evidence at the end of each second of a step of equal arms, by way of the journal."""
    known = Traffic(share=0.0, epoch=2).requests(T - 30, 30, seed=99)
    by_second: dict[int, list[Request]] = {}
    for line in traffic.requests(T, seconds, seed=seed):
        by_second.setdefault(int(line.t - T), []).append(line)
    evidence = fold(Evidence(), known, arm=ARM, plan=PLAN)
    for second in range(seconds):
        evidence = fold(evidence, by_second.get(second, []), arm=ARM, plan=PLAN, now=T + second + 1)
        evidence = Evidence.from_json(json.loads(json.dumps(evidence.to_json())))
        yield evidence


def after(traffic: Traffic, seconds: int) -> Evidence:
    return list(seconds_of(traffic, seconds))[-1]


def test_the_time_that_is_left_is_right_within_a_factor_of_three_once_half_of_it_is_over() -> None:
    ratios = []
    for seed in range(5):
        course = []
        for evidence in seconds_of(Traffic(requests_per_s=30), 400, seed):
            course.append(evidence)
            if not not_proven(PLAN, evidence):
                break
        half = len(course) // 2
        left = [
            course[half].seconds_to_proof(f"not slower {name}", PLAN.promote_at) for name in ("p50", "p95")
        ]
        ratios.append(max(wait for wait in left if wait is not None) / (len(course) - half))
    print("estimated over true time left:", *(f"{ratio:.2f}" for ratio in sorted(ratios)))
    assert 1 / 3 < sorted(ratios)[2] < 3


def test_more_traffic_means_less_time_left() -> None:
    slow, fast = (after(Traffic(requests_per_s=per_s), 20) for per_s in (6, 60))
    waits = [evidence.seconds_to_proof("not slower p50", 1e6) for evidence in (slow, fast)]
    assert waits[0] is not None
    assert waits[1] is not None
    assert waits[1] < waits[0] / 2


def test_the_last_step_says_what_is_missing_how_sure_it_is_and_how_long_it_takes() -> None:
    evidence = after(Traffic(requests_per_s=20), 40)
    verdict, reason = judge_step(PLAN, evidence, elapsed_s=40.0, last=True)
    assert verdict is Verdict.WAIT
    assert re.fullmatch(
        r"waiting for evidence that (p50|p95|p50 and p95) (is|are) slower by at most 20% "
        r"\(bad_margin; (about \d+ (s|min)|less than 10 s) left at this traffic\); it is promoted without you once "
        r"there is enough; `serin rollout promote` promotes it now, `serin rollout abort` ends the rollout",
        reason,
    ), reason


def test_too_little_traffic_is_said_and_not_guessed_from() -> None:
    early = after(Traffic(requests_per_s=20), 8)
    assert (
        "not enough traffic to tell how long it takes" in judge_step(PLAN, early, elapsed_s=8.0, last=True)[1]
    )


def test_a_candidate_at_the_bad_margin_comes_no_closer() -> None:
    evidence = after(Traffic(requests_per_s=200, slower=1.3), 40)
    assert "at this traffic it does not come closer" in not_proven(PLAN, evidence)


@pytest.mark.parametrize(("wins", "target"), [(0.3, 20.0), (0.8, 1e4)])
def test_steady_wins_reach_the_target_in_the_time_that_was_foretold(wins: float, target: float) -> None:
    wealth = start()
    for _ in range(10):
        wealth = bet(wealth, np.asarray(wins))
    left = seconds_until(wealth, wealth / 10, target)
    blocks = 0
    while float(e_value(wealth)) < target:
        wealth, blocks = bet(wealth, np.asarray(wins)), blocks + 1
    assert blocks - 1 < left <= blocks


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "not enough traffic to tell how long it takes"),
        (float("inf"), "at this traffic it does not come closer"),
        (3.0, "less than 10 s left at this traffic"),
        (44.0, "about 40 s left at this traffic"),
        (200.0, "about 3 min left at this traffic"),
        (9000.0, "about 2 h left at this traffic"),
    ],
)
def test_a_wait_is_as_precise_as_it_is_known(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_a_doubt_says_how_often_chance_shows_as_much_and_when_it_is_enough() -> None:
    assert doubt(PLAN, "p95", 6.6) == (
        "it looks as if its p95 is slower than allowed (10%); a good version looks like this in at most 30% of "
        "rollouts, it is rolled back at 1%"
    )
    assert PLAN.rollback_risk(PLAN.rollback_at) == pytest.approx(PLAN.false_rollback)
    assert PLAN.promotion_risk(PLAN.promote_at) == pytest.approx(PLAN.false_promotion)


def test_a_journal_of_before_says_nothing_about_the_pace() -> None:
    content = after(Traffic(requests_per_s=20), 20).to_json()
    del content["pace"]
    assert Evidence.from_json(content).seconds_to_proof("not slower p50", 20.0) is None
