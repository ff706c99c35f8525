"""A step whose traffic ends says since when there are no requests, holds, and continues where it was."""

from dataclasses import replace
from pathlib import Path

import pytest

from serin.rollout.decide.advance import Seen, advance
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.sentences import silence
from serin.rollout.decide.state import Hold, Phase, Rollout, Verdict
from serin.rollout.decide.verdict import judge_bake, judge_step
from tests.fakes.one_gateway import LogJudge
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic
from tests.unit.rollout.test_judge import SHIFTING, write_both

T = 1_800_000_000.0  # 08:00 UTC
PLAN = Plan(step_s=30.0, min_requests=100, deadline_s=3600.0, slo_ms=50.0, warmup_s=0.0)
ARM = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=0.5, since=3)


def after(traffic: Traffic, seconds: float, then_s: float) -> Evidence:
    """The evidence some time after the traffic has ended."""
    known = Traffic(share=0.0, epoch=2).requests(T - 30, 30, seed=99)
    return fold(
        Evidence(), [*known, *traffic.requests(T, seconds)], arm=ARM, plan=PLAN, now=T + seconds + then_s
    )


FEW = Traffic(requests_per_s=4)


@pytest.mark.parametrize("last", [False, True])
def test_a_step_whose_traffic_ended_has_no_traffic_and_says_since_when(last: bool) -> None:
    evidence = after(FEW, 25, 420)
    assert judge_step(PLAN, evidence, elapsed_s=445, last=last) == (
        Verdict.NO_TRAFFIC,
        f"no requests since 08:00 UTC; {evidence.compared} of 100 requests are compared",
    )


def test_the_proof_of_the_last_step_has_no_time_left_without_traffic() -> None:
    evidence = after(Traffic(requests_per_s=20), 30, 420)
    verdict, reason = judge_step(PLAN, evidence, elapsed_s=450, last=True)
    assert verdict is Verdict.NO_TRAFFIC
    assert reason.startswith("no requests since 08:00 UTC; waiting for evidence that p")
    assert "(bad_margin); it is promoted without you once there is enough; `serin rollout promote`" in reason
    assert "left at this traffic" not in reason


def test_silence_changes_neither_a_pass_nor_the_deadline() -> None:
    enough = after(Traffic(requests_per_s=100), 60, 420)
    assert judge_step(PLAN, enough, elapsed_s=480, last=False)[0] is Verdict.PASS
    verdict, reason = judge_step(PLAN, after(FEW, 25, 3600), elapsed_s=3625, last=False)
    assert verdict is Verdict.INCONCLUSIVE
    assert reason.startswith("not settled by the deadline of 3600 s: no requests since 08:00 UTC; ")


def test_a_step_that_still_takes_its_time_and_a_bake_mention_the_silence() -> None:
    evidence = after(FEW, 25, 420)
    for verdict, reason in (
        judge_step(replace(PLAN, step_s=600.0), evidence, elapsed_s=445, last=False),
        judge_bake(replace(PLAN, bake_s=600.0), evidence, elapsed_s=445),
    ):
        assert verdict is Verdict.WAIT
        assert reason.endswith("; no requests since 08:00 UTC")


@pytest.mark.parametrize(
    ("traffic", "seconds", "then_s", "words"),
    [
        (FEW, 25, 30, ""),
        (FEW, 25, 90, "no requests since 08:00 UTC"),
        (FEW, 25, 30 * 3600, "no requests for 30 h"),
        (Traffic(requests_per_s=0.02), 3600, 120, ""),  # a request in 50 s
        (Traffic(requests_per_s=0.02), 3600, 1200, "no requests since 08:5"),
    ],
)
def test_silence_is_much_longer_than_the_usual_gap(
    traffic: Traffic, seconds: float, then_s: float, words: str
) -> None:
    said = silence(after(traffic, seconds, then_s))
    assert said.startswith(words)
    assert bool(said) is bool(words)


def test_traffic_that_was_never_there_did_not_end() -> None:
    assert silence(fold(Evidence(), [], arm=ARM, plan=PLAN, now=T)) == ""


def _at(now: Rollout, log: Path, t: float) -> Rollout:
    return advance(now, Seen(judgement=LogJudge(log).judge(now, t)), t)


STEP = replace(
    SHIFTING,
    plan=replace(SHIFTING.plan, min_requests=100, deadline_s=3600.0),
    began=T,
    since=T,
    evidence_from=T,
)


def test_a_rollout_holds_while_its_traffic_is_away_and_its_step_keeps_its_time(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write_both(log, *(T + i / 2 for i in range(40)))
    now = _at(STEP, log, T + 30)
    assert (now.hold, now.verdict) == (None, Verdict.WAIT)
    now = _at(now, log, T + 300)
    assert (now.hold, now.phase) == (Hold.NO_TRAFFIC, Phase.SHIFTING)
    assert now.reason.startswith("no requests since 08:00 UTC; 40 of 100 requests are compared")
    write_both(log, *(T + 300 + i / 2 for i in range(40)))
    now = _at(now, log, T + 330)
    assert (now.hold, now.verdict, now.since) == (None, Verdict.WAIT, T)
    assert now.reason.startswith("traffic is back; 80 of 100 requests are compared")


def test_an_incident_that_ends_in_silence_still_begins_the_step_again(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    write_both(log, *(T + i / 2 for i in range(40)))
    now = replace(_at(STEP, log, T + 30), hold=Hold.INCIDENT)
    now = _at(now, log, T + 300)
    assert (now.hold, now.since, now.epoch) == (None, T + 300, STEP.epoch + 1)


def test_a_step_that_never_had_a_request_begins_its_time_with_the_first(tmp_path: Path) -> None:
    log = tmp_path / "requests.jsonl"
    log.touch()
    now = _at(STEP, log, T + 300)
    assert now.hold is Hold.NO_TRAFFIC
    write_both(log, *(T + 300 + i / 2 for i in range(40)))
    now = _at(now, log, T + 330)
    assert (now.hold, now.since) == (None, T + 330)
