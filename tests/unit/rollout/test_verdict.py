from __future__ import annotations

import json
from typing import Any

import pytest

from serin.formats.request import Request
from serin.rollout.evidence import RECENT_S, Counts, Evidence, fold
from serin.rollout.plan import Plan
from serin.rollout.verdict import Verdict, judge_bake, judge_step

PLAN = Plan(step_s=30.0, min_requests=100, max_error_share=0.02, deadline_s=600.0, bake_s=60.0)


def request(t: float = 100.0, **changes: Any) -> Request:
    fields = Request(
        t, "flights", 3, "candidate", "flights-v2", 200, None, 900.0, 800.0, 1, "-", "HTTP/1.1", "a"
    )
    return fields._replace(**changes)


def folded(requests: list[Request], before: Evidence | None = None, **changes: Any) -> Evidence:
    how: dict[str, Any] = {"epoch": 3, "candidate": "flights-v2", "stable": "flights-v1", "since": 50.0}
    return fold(before or Evidence(), requests, **(how | changes))


STEP = [
    # elapsed, candidate, stable's last seconds, verdict
    (10, Counts(500, 0), Counts(), Verdict.WAIT),
    (30, Counts(100, 2), Counts(), Verdict.PASS),
    (30, Counts(99, 0), Counts(), Verdict.WAIT),
    (4, Counts(3, 3), Counts(500, 0), Verdict.FAIL),
    (4, Counts(3, 2), Counts(500, 0), Verdict.WAIT),
    (400, Counts(1000, 21), Counts(500, 1), Verdict.FAIL),
    (400, Counts(1000, 20), Counts(500, 1), Verdict.PASS),
    (4, Counts(3, 3), Counts(500, 20), Verdict.FAIL),
    (4, Counts(50, 6), Counts(500, 31), Verdict.INCIDENT),
    (4, Counts(50, 6), Counts(500, 30), Verdict.FAIL),
    (4, Counts(3, 3), Counts(2, 2), Verdict.INCIDENT),
    (4, Counts(3, 3), Counts(0, 0), Verdict.FAIL),
    (60, Counts(200, 0), Counts(500, 400), Verdict.PASS),
    (30, Counts(), Counts(500, 0), Verdict.NO_TRAFFIC),
    (30, Counts(), Counts(), Verdict.NO_TRAFFIC),
    (6000, Counts(), Counts(), Verdict.NO_TRAFFIC),
    (600, Counts(99, 0), Counts(), Verdict.INCONCLUSIVE),
    (600, Counts(99, 3), Counts(), Verdict.FAIL),
]


@pytest.mark.parametrize(("elapsed_s", "candidate", "recent", "expected"), STEP)
def test_a_step_is_judged_as_the_table_says(
    elapsed_s: float, candidate: Counts, recent: Counts, expected: Verdict
) -> None:
    evidence = Evidence(candidate=candidate, stable=recent, blocks={99: recent})
    assert judge_step(PLAN, evidence, elapsed_s=elapsed_s)[0] is expected


@pytest.mark.parametrize(
    ("share", "elapsed_s", "candidate", "expected"),
    [
        (0.01, 30, Counts(20, 1), Verdict.WAIT),
        (0.01, 30, Counts(99, 1), Verdict.WAIT),
        (0.01, 30, Counts(100, 1), Verdict.PASS),
        (0.01, 600, Counts(20, 1), Verdict.INCONCLUSIVE),
        (0.01, 30, Counts(20, 2), Verdict.WAIT),
        (0.01, 30, Counts(20, 3), Verdict.FAIL),
        (0.0, 1, Counts(20, 1), Verdict.FAIL),
    ],
)
def test_one_failure_among_few_is_no_proof_unless_none_is_allowed(
    share: float, elapsed_s: float, candidate: Counts, expected: Verdict
) -> None:
    plan = Plan(step_s=30.0, min_requests=20, max_error_share=share, deadline_s=600.0)
    assert judge_step(plan, Evidence(candidate=candidate), elapsed_s=elapsed_s)[0] is expected


def test_silence_means_nothing_before_the_log_can_have_been_written() -> None:
    plan = Plan(step_s=1.0)
    assert judge_step(plan, Evidence(), elapsed_s=2)[0] is Verdict.WAIT
    assert judge_step(plan, Evidence(), elapsed_s=6)[0] is Verdict.NO_TRAFFIC


def test_a_plan_that_asks_for_no_requests_passes_on_time_alone() -> None:
    assert judge_step(Plan(step_s=1.0, min_requests=0), Evidence(), elapsed_s=1)[0] is Verdict.PASS


@pytest.mark.parametrize(
    ("elapsed_s", "candidate", "expected"),
    [
        (59, Counts(500, 1), Verdict.WAIT),
        (60, Counts(500, 1), Verdict.PASS),
        (60, Counts(), Verdict.PASS),
        (5, Counts(500, 11), Verdict.FAIL),
    ],
)
def test_a_bake_is_judged_as_the_table_says(elapsed_s: float, candidate: Counts, expected: Verdict) -> None:
    assert judge_bake(PLAN, Evidence(candidate=candidate), elapsed_s=elapsed_s)[0] is expected


def test_the_reason_gives_the_numbers() -> None:
    _, reason = judge_step(PLAN, Evidence(candidate=Counts(200, 9)), elapsed_s=1)
    assert reason == "candidate failed 9 of 200 requests, limit 2.000%"


def test_requests_are_counted_by_arm_and_failures_with_them() -> None:
    stable = request(arm="stable", release="flights-v1")
    evidence = folded([request(), request(code=503), request(attempts=2), stable])
    assert (evidence.candidate, evidence.stable) == (Counts(3, 2), Counts(1, 0))


@pytest.mark.parametrize(
    "other",
    [
        {"arm": "pinned"},
        {"release": "flights-v7"},
        {"arm": "stable", "release": "flights-v2"},
        {"model": "taxis", "release": "taxis-v2"},
        {"t": 49.0},
    ],
)
def test_requests_that_nobody_drew_lots_for_are_no_evidence(other: dict[str, Any]) -> None:
    assert folded([request(**other)]).candidate == Counts()


def test_a_new_epoch_counts_anew_and_a_late_line_still_counts() -> None:
    before = folded([request(), request()])
    after = folded([request(epoch=3, code=500), request(epoch=4)], before, epoch=4)
    assert (after.epoch, after.candidate) == (4, Counts(2, 1))


def test_evidence_in_pieces_through_json_equals_evidence_at_once() -> None:
    requests = [
        request(
            100 + i * 0.37,
            arm=("stable", "candidate")[i % 3 == 0],
            release=("flights-v1", "flights-v2")[i % 3 == 0],
            code=503 if i % 11 == 0 else 200,
        )
        for i in range(300)
    ]
    pieces = Evidence()
    for start in range(0, 300, 7):
        pieces = folded(requests[start : start + 7], pieces)
        pieces = Evidence.from_json(json.loads(json.dumps(pieces.to_json())))
    assert pieces == folded(requests)
    assert len(pieces.blocks or {}) <= RECENT_S


def test_only_the_last_seconds_of_stable_are_recent() -> None:
    stable = [
        request(float(t), arm="stable", release="flights-v1", code=500 if t < 100 else 200)
        for t in range(60, 160)
    ]
    evidence = folded(stable)
    assert evidence.stable == Counts(100, 40)
    assert evidence.stable_recent == Counts(30, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": []}, "rise"),
        ({"steps": [5, 5, 100]}, "rise"),
        ({"steps": [5, 50]}, "rise"),
        ({"steps": [0, 100]}, "rise"),
        ({"mode": "dry"}, "mode 'dry'"),
        ({"max_error_share": 2}, "max_error_share"),
        ({"min_requests": -1}, "min_requests"),
        ({"bake_s": float("nan")}, "times"),
        ({"speed": 3}, "has no speed"),
    ],
)
def test_a_plan_no_rollout_could_follow_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(PLAN.to_json() | changes)


def test_a_plan_comes_back_from_json() -> None:
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
