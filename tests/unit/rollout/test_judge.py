"""Verdicts: what the judge reads, and what follows from the evidence of both releases."""

import json
import random
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serin.formats.serving.request import Request
from serin.monitoring.objectives.burn import PAIRS
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase, Rollout, Verdict
from serin.rollout.decide.verdict import judge_bake, judge_step, weigh
from serin.rollout.run.record import decision2rollout, rollout2decision
from serin.spec.objectives import PAGE_BURN, ObjectivesSpec
from serin.spec.rollout import RolloutSpec
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Release
from tests.fakes.one_gateway import LogJudge
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic, changed

V1, V2 = Release(model="flights", version=1), Release(model="flights", version=2)
T = 1000.0
SHIFTING = Rollout(
    id="r1",
    candidate=V2,
    stable=V1,
    previous=None,
    plan=Plan(
        steps=(50.0, 100.0), step_s=10.0, min_requests=20, max_error_share=0.1, bake_s=60.0, warmup_s=0.0
    ),
    phase=Phase.SHIFTING,
    step=0,
    epoch=4,
    began=T,
    since=T,
    evidence_from=T,
    evidence_epoch=4,
)


def write(log: Path, *times: float, **changes: Any) -> None:
    with log.open("a") as file:
        for t in times:
            fields: dict[str, Any] = {
                "t": f"{t:.6f}", "model": "flights", "epoch": 4, "arm": "candidate", "release": "flights-v2",
                "code": 200, "grpc": None, "us": 1500, "attempts": 1, "flags": "-", "id": "a",
                "ms": 1.6, "received_ms": 0.1,
            }  # fmt: skip
            file.write(json.dumps(fields | changes) + "\n")


def write_both(log: Path, *times: float, **changes: Any) -> None:
    """One request of each arm at each time; what `changes` says is the candidate's."""
    for t in times:
        write(log, t, **changes)
        write(log, t + 0.0107, arm="stable", release="flights-v1")


def test_a_step_passes_when_the_log_shows_enough_good_requests(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write(log, *(T - 5 + i for i in range(3)), code=500, epoch=3)
    write_both(log, *(T + i / 4 for i in range(20)))
    judge, now = LogJudge(log), replace(SHIFTING, plan=replace(SHIFTING.plan, steps=(50.0, 80.0, 100.0)))
    assert judge.judge(now, T + 5).verdict is Verdict.WAIT
    assert judge.judge(now, T + 10).verdict is Verdict.PASS


def test_the_last_step_before_all_traffic_asks_for_proof(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write_both(log, *(T + i / 4 for i in range(20)))
    found = LogJudge(log).judge(SHIFTING, T + 10)
    assert found.verdict is Verdict.WAIT
    assert found.reason.startswith("waiting for evidence that p50 and p95 are slower by at most 20% (")


def test_evidence_resumes_exactly_from_the_journal(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    judge, now = LogJudge(log), SHIFTING
    for second in range(8):
        write_both(log, T + second, T + second + 0.5, code=500 if second == 2 else 200)
        found = judge.judge(now, T + second + 1)
        line = rollout2decision(replace(now, evidence=found.evidence), T)
        now, judge = (
            decision2rollout(replace(line, evidence=json.loads(json.dumps(line.evidence)))),
            LogJudge(log),
        )
    assert now.evidence == LogJudge(log).judge(SHIFTING, T + 8).evidence
    assert LogJudge(log).judge(now, T + 60).evidence["guards"]["candidate"] == [16, 2, 0, 0]


def test_a_failing_candidate_fails_at_once(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write_both(log, *(T + i / 4 for i in range(40)), attempts=2)
    found = LogJudge(log).judge(SHIFTING, T + 10)
    assert found.verdict is Verdict.FAIL
    assert found.reason.startswith("more than 10% of its requests fail; ")


def test_a_missing_log_means_no_traffic(tmp_path: Path) -> None:
    assert LogJudge(tmp_path / "none.jsonl").judge(SHIFTING, T + 20).verdict is Verdict.NO_TRAFFIC


def test_a_log_that_cannot_be_read_is_an_incident_and_loses_no_evidence(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write(log, T + 1)
    now = replace(SHIFTING, evidence=LogJudge(log).judge(SHIFTING, T + 2).evidence)
    log.unlink()
    log.mkdir()
    found = LogJudge(log).judge(now, T + 3)
    assert (found.verdict, found.evidence) == (Verdict.INCIDENT, now.evidence)


def test_a_bake_is_judged_by_the_rules_of_the_bake(tmp_path: Path) -> None:
    now = replace(SHIFTING, phase=Phase.BAKING, step=1, epoch=5)
    assert LogJudge(tmp_path / "none.jsonl").judge(now, T + 61).verdict is Verdict.NO_TRAFFIC
    log = tmp_path / "requests.jsonl"
    write(log, T + 1, epoch=5)
    assert LogJudge(log).judge(now, T + 61).verdict is Verdict.PASS


def test_bad_lines_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write(log, T + 1)
    with log.open("a") as file:
        file.write("garbage\n")
    assert LogJudge(log).judge(SHIFTING, T + 2).evidence["bad_lines"] == 1


def test_a_busy_log_is_read_and_judged_faster_than_it_grows(tmp_path: Path) -> None:
    """50,000 lines a second are wanted of one core that has nothing else to do; a tenth of that would still do."""
    log = tmp_path / "requests.jsonl"
    write_both(log, *(T + i / 500 for i in range(10_000)))
    began = time.process_time()
    found = LogJudge(log).judge(SHIFTING, T + 60)
    lines_per_s = 20_000 / (time.process_time() - began)
    assert found.evidence["guards"]["candidate"][0] == 10_000
    assert lines_per_s > 5_000, f"{lines_per_s:.0f} lines/s"


@pytest.mark.parametrize("seed", range(3))
def test_a_judge_that_is_killed_at_any_moment_comes_to_the_same_evidence(tmp_path: Path, seed: int) -> None:
    """It goes on from what was journaled last, while the log has grown in pieces that end anywhere in a line."""
    draw = random.Random(seed)
    requests = Traffic(requests_per_s=30, slower=1.4, errors=(0.01, 0.05), epoch=4).requests(T, 15, seed=seed)
    lines = [json.dumps(dict(zip(Request._fields, line, strict=True))) + "\n" for line in requests]
    data = "".join(lines).encode()
    log = tmp_path / "requests.jsonl"
    now = journaled = SHIFTING
    written = kills = 0
    while written < len(data):
        written = min(written + draw.randrange(1, 6000), len(data))
        log.write_bytes(data[:written])
        if draw.random() < 0.3:
            now, kills = journaled, kills + 1
        now = replace(now, evidence=LogJudge(log).judge(now, T).evidence)
        if draw.random() < 0.3:
            line = rollout2decision(now, T)
            journaled = decision2rollout(replace(line, evidence=json.loads(json.dumps(line.evidence))))
    assert kills > 1
    calm = LogJudge(log).judge(SHIFTING, T + 60)
    found = LogJudge(log).judge(now, T + 60)
    assert json.dumps(found.evidence["guards"]) == json.dumps(calm.evidence["guards"])
    assert (found.verdict, found.reason) == (calm.verdict, calm.reason)


PLAN = Plan(
    step_s=30.0,
    min_requests=100,
    max_error_share=0.02,
    deadline_s=600.0,
    bake_s=60.0,
    slo_ms=50.0,
    warmup_s=0.0,
)


def seen(requests: list[Request], share: float = 0.5, before: Evidence | None = None) -> Evidence:
    """All of it, the traffic before the rollout too."""
    known = Traffic(share=0.0, epoch=2).requests(T - 30, 30, seed=99)
    arm = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=share, since=3)
    end = max((request.t for request in requests), default=T)
    return fold(before or Evidence(), [*known, *requests], arm=arm, plan=PLAN, now=end + 60)


def step(requests: list[Request], **changes: Any) -> tuple[Verdict, str]:
    how: dict[str, Any] = {"elapsed_s": 60.0, "last": False, "plan": PLAN, "share": 0.5}
    how |= changes
    return judge_step(how["plan"], seen(requests, how["share"]), elapsed_s=how["elapsed_s"], last=how["last"])


EQUAL = Traffic().requests(T, 60)


FEW = Traffic(requests_per_s=2).requests(T, 30)
UNPROVEN = Traffic(requests_per_s=4, slower=1.1).requests(T, 60)
V = Verdict
VERDICTS: dict[str, tuple[list[Request], dict[str, Any], Verdict]] = {
    "a candidate that fails a little more often": (Traffic(errors=(0.0, 0.015)).requests(T, 120), {}, V.FAIL),
    "failures of both arms": (Traffic(errors=(0.005, 0.005)).requests(T, 120), {}, V.PASS),
    "much worse than a broken stable": (Traffic(errors=(0.05, 0.5)).requests(T, 60), {}, V.FAIL),
    "a step takes its time": (EQUAL, {"elapsed_s": 29.0}, V.WAIT),
    "too few requests wait": (FEW, {"elapsed_s": 30.0}, V.WAIT),
    "until the deadline": (FEW, {"elapsed_s": 600.0}, V.INCONCLUSIVE),
    "without a request": ([], {"elapsed_s": 30.0}, V.NO_TRAFFIC),
    "without a request for long": ([], {"elapsed_s": 6000.0}, V.NO_TRAFFIC),
    "before the log can be written": ([], {"elapsed_s": 4.0, "plan": replace(PLAN, step_s=1.0)}, V.WAIT),
    "by time alone": ([], {"plan": replace(PLAN, min_requests=0), "last": True}, V.PASS),
    "all traffic needs proof": (Traffic().requests(T, 5), {"last": True}, V.WAIT),
    "which comes": (EQUAL, {"last": True}, V.PASS),
    "or does not come": (UNPROVEN, {"last": True, "elapsed_s": 600}, V.INCONCLUSIVE),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_on_a_step_is_as_the_table_says(case: str) -> None:
    requests, how, expected = VERDICTS[case]
    assert step(requests, **how)[0] is expected


def test_an_equal_candidate_passes_a_step() -> None:
    verdict, reason = step(EQUAL)
    assert verdict is Verdict.PASS
    assert re.match(
        r"\d+ requests, nothing speaks against it; candidate: 0 of \d+ failed, p50/p95/p99 ", reason
    )


@pytest.mark.parametrize("slower", [1.5, 2.0])
def test_a_slow_candidate_fails_and_the_reason_names_the_guard_and_both_arms(slower: float) -> None:
    verdict, reason = step(Traffic(slower=slower).requests(T, 45))
    assert verdict is Verdict.FAIL
    assert re.match(
        r"its p\d\d is slower than allowed \(10%\); a good version looks like this in at most 1% of", reason
    )
    assert re.search(r"; candidate: 0 of \d+ failed, p50/.* ms; stable: 0 of ", reason)


def test_a_candidate_within_the_margin_does_not_fail() -> None:
    assert step(Traffic(slower=1.08).requests(T, 300), elapsed_s=300.0)[0] is not Verdict.FAIL


def test_a_candidate_that_fails_outright_fails_within_seconds() -> None:
    verdict, reason = step(Traffic(errors=(0.0, 1.0)).requests(T, 3), elapsed_s=3.0)
    assert verdict is Verdict.FAIL
    assert reason.startswith("more than 2% of its requests fail; ")


def test_a_candidate_that_calls_its_clients_wrong_fails_though_it_is_fast() -> None:
    """Such as one that asks for an input that nobody sends: clients see it, and no other release answers for it."""
    refusing = changed(
        Traffic(share=0.05).requests(T, 25),
        lambda line: line.arm == "candidate",
        lambda line: line._replace(code=400, us=200.0),
    )
    verdict, reason = step(refusing, share=0.05, elapsed_s=25.0)
    assert (verdict, reason.split(";")[0]) == (
        Verdict.FAIL, "it refuses more requests than the stable version"
    )  # fmt: skip
    assert re.search(r"candidate: 0 of \d+ failed, \d\d+ refused, .*; stable: 0 of \d+ failed, 2", reason)


def test_client_errors_in_both_arms_do_not_roll_back() -> None:
    draw = np.random.default_rng(1)
    wrong = [line._replace(code=400) if draw.random() < 0.1 else line for line in EQUAL]
    assert step(wrong)[0] is Verdict.PASS


def test_both_arms_breaking_a_promise_is_an_incident() -> None:
    verdict, reason = step(Traffic(errors=(0.2, 0.2)).requests(T, 60))
    assert verdict is Verdict.INCIDENT
    assert "both arms" in reason


def test_after_an_incident_stable_excuses_nothing() -> None:
    trouble = Traffic(errors=(0.2, 0.2)).requests(T, 30)
    verdict, _ = step([*trouble, *Traffic().requests(T + 30, 40, seed=1)])
    assert verdict is not Verdict.INCIDENT


def test_a_split_that_is_not_as_the_weights_say_is_invalid() -> None:
    verdict, reason = step(Traffic(share=0.2).requests(T, 60))
    assert verdict is Verdict.INVALID
    assert "instead of 50.00%" in reason


def test_a_suspect_candidate_does_not_pass() -> None:
    evidence = seen(Traffic(slower=1.5).requests(T, 4), share=0.5)
    weighed = weigh(PLAN, evidence)
    assert 1 < weighed.total < 0.1 * PLAN.rollback_at
    enough = replace(PLAN, min_requests=20)
    verdict, reason = judge_step(enough, evidence, elapsed_s=60, last=False)
    assert (verdict, "it looks as if its p" in reason) == (Verdict.WAIT, True)
    assert judge_step(enough, evidence, elapsed_s=600, last=False)[0] is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("seed", range(5))
def test_a_candidate_slower_by_the_bad_margin_does_not_get_all_traffic(seed: int) -> None:
    requests = Traffic(slower=1.2).requests(T, 100, seed=seed)
    assert step(requests, last=True, elapsed_s=100)[0] is not Verdict.PASS


@pytest.mark.parametrize(
    ("traffic", "elapsed_s", "expected"),
    [
        (Traffic(share=1.0), 59, Verdict.WAIT),
        (Traffic(share=1.0), 60, Verdict.PASS),
        (Traffic(share=1.0, errors=(0, 0.01)), 60, Verdict.PASS),
        (Traffic(share=1.0, errors=(0, 0.1)), 20, Verdict.FAIL),
        (Traffic(share=1.0, slower=20), 20, Verdict.FAIL),
    ],
)
def test_a_bake_holds_the_candidate_to_what_was_promised(
    traffic: Traffic, elapsed_s: float, expected: Verdict
) -> None:
    evidence = seen(traffic.requests(T, 20), share=1.0)
    assert judge_bake(PLAN, evidence, elapsed_s=elapsed_s)[0] is expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": []}, "must increase"),
        ({"steps": [5, 5, 100]}, "must increase"),
        ({"steps": [5, 50]}, "must increase"),
        ({"steps": [0, 100]}, "must increase"),
        ({"mode": "dry"}, "mode: .*, not 'dry'"),
        ({"max_error_share": 2}, "max_error_share"),
        ({"min_requests": -1}, "min_requests"),
        ({"false_rollback": 0}, "false_rollback"),
        ({"quantiles": [0.5, 1]}, "quantiles"),
        ({"bad_margin": 0.05}, "bad_margin"),
        ({"bake_s": float("nan")}, "bake_s"),
        ({"shadow": {"rows": 0}}, "shadow: rows"),
        ({"speed": 3}, "speed: Unexpected"),
    ],
)
def test_a_plan_no_rollout_could_follow_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(PLAN.to_json() | changes)


@pytest.mark.parametrize(
    ("availability", "latency_share", "failed", "slow"),
    [(0.999, 0.99, 0.006, 0.06), (0.99, 0.9, 0.06, 0.55), (0.9999, 0.5, 0.0006, 0.75)],
)
def test_a_promise_is_broken_where_the_watcher_would_page(
    availability: float, latency_share: float, failed: float, slow: float
) -> None:
    promised = ObjectivesSpec(availability=availability, latency_share=latency_share, latency_ms=30)
    found = Plan.from_spec(RolloutSpec(), ServingSpec(), promised)
    shares = (found.max_error_share, found.max_slow_share)
    assert (shares, found.slo_ms) == (pytest.approx((failed, slow)), 30)
    assert any(pair.threshold == PAGE_BURN and pair.severity == "page" for pair in PAIRS)


def test_a_plan_comes_back_from_json() -> None:
    assert Plan.from_json(json.loads(json.dumps(PLAN.to_json()))) == PLAN
