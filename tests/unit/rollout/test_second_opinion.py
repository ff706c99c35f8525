from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase
from serin.rollout.decide.verdict import Verdict, fails_by_latency_alone, judge_step
from serin.rollout.run.status import history
from tests.fakes.rollout import FakeFleet
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic
from tests.unit.rollout.conftest import PLAN, Scene, release

ASKS = replace(PLAN, second_opinion=True)
T = 1000.0


def test_a_candidate_that_was_slow_by_chance_is_started_again_and_promoted(scene: Scene) -> None:
    scene.promote_first()
    scene.judge.slow_by_chance = True
    scene.command("start", 2, plan=ASKS)
    turned = scene.until(Phase.WITHDRAWING)
    route = scene.router.route("flights")
    assert route
    assert (route.candidate_percent, turned.restarted) == (0, True)
    again = scene.until(Phase.SHIFTING)
    assert (again.step, again.evidence) == (0, {}), "what its first process did is no evidence"
    scene.until(Phase.PROMOTED)
    found = [decision.phase for decision in history(scene.home, "flights", turned.id)]
    assert [phase for phase, _ in groupby(found)][3:9] == [
        "shifting", "withdrawing", "restarting", "loading", "verifying", "shifting"
    ]  # fmt: skip
    assert scene.fleet.starts.count("flights-v2") == 2


def test_a_candidate_that_is_slow_again_is_rolled_back(scene: Scene) -> None:
    scene.promote_first()
    scene.judge.slow_by_chance = True
    scene.judge.verdicts[5.0] = Verdict.FAIL
    scene.command("start", 2, plan=ASKS)
    now = scene.until(Phase.ROLLED_BACK)
    assert (now.restarted, scene.fleet.starts.count("flights-v2")) == (True, 2)
    scene.tick(3)
    assert scene.fleet.running() == [release(1)]


def test_it_is_started_again_with_its_baseline_at_the_step_where_it_was(scene: Scene) -> None:
    scene.promote_first()
    plan = replace(ASKS, steps=(5.0, 25.0, 100.0), baseline=True)
    scene.command("start", 2, plan=plan)
    scene.until_true(lambda now: now.weight_percent == 25)
    scene.judge.slow_by_chance = True
    scene.until(Phase.RESTARTING)
    scene.until_true(lambda now: now.weight_percent == 25)
    assert scene.fleet.starts.count("flights-v1-baseline") == 2
    scene.until(Phase.PROMOTED)


def test_a_person_may_abort_or_promote_while_it_is_started_again(tmp_path: Path) -> None:
    for command, end in (("abort", Phase.ROLLED_BACK), ("promote", Phase.PROMOTED)):
        for phase in (Phase.WITHDRAWING, Phase.RESTARTING):
            scene = Scene(tmp_path / f"{command}-{phase}")
            scene.promote_first()
            scene.judge.slow_by_chance = True
            scene.command("start", 2, plan=ASKS)
            scene.until(phase)
            scene.command(command)  # type: ignore[arg-type]
            scene.until(end)
            scene.kill()


def test_mode_hold_asks_a_person_after_the_second_opinion(scene: Scene) -> None:
    scene.promote_first()
    scene.judge.slow_by_chance = True
    scene.judge.verdicts[5.0] = Verdict.FAIL
    scene.command("start", 2, plan=replace(ASKS, mode="hold"))
    assert scene.until_true(lambda now: now.hold is Hold.FAILED).restarted


def test_a_server_that_cannot_be_started_again_is_rolled_back_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeFleet, "instance", lambda *_: None)
    scene.promote_first()
    scene.judge.slow_by_chance = True
    scene.command("start", 2, plan=ASKS)
    assert not scene.until(Phase.ABORTING).restarted


@pytest.mark.parametrize(
    ("traffic", "alone"),
    [
        (Traffic(slower=3.0), True),
        (Traffic(slower=100.0), False),  # beyond what was promised
        (Traffic(slower=3.0, errors=(0.0, 0.05)), False),
        (Traffic(errors=(0.0, 0.5)), False),
    ],
)
def test_only_a_candidate_that_keeps_its_promises_gets_a_second_opinion(
    traffic: Traffic, alone: bool
) -> None:
    plan = Plan(slo_ms=50.0, warmup_s=0.0)
    arm = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=0.5, since=3)
    evidence = fold(Evidence(), traffic.requests(T, 30), arm=arm, plan=plan, now=T + 60)
    assert judge_step(plan, evidence, elapsed_s=30, last=False)[0] is Verdict.FAIL
    assert fails_by_latency_alone(plan, evidence) is alone
