"""What a candidate is held against: a second process of the stable version, a second opinion, and labels."""

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from serin.errors import NameInvalid
from serin.formats.serving.quality_evidence import QualityBlocks, read_quality_blocks, write_quality_blocks
from serin.formats.serving.request import Request
from serin.rollout.decide.blocks import columns, cut
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.guards import bet_on_quality
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout, Verdict
from serin.rollout.decide.verdict import fails_by_latency_alone, judge_step, weigh
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.status import history, model_status
from serin.spec.objectives import ObjectivesSpec
from serin.spec.rollout import RolloutSpec
from serin.spec.serving import ServingSpec
from serin.store.artifacts import ModelRoute, Release
from serin.store.home_objects import HomeObjects
from tests.fakes.one_gateway import LogJudge
from tests.fakes.rollout import FakeFleet
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic
from tests.unit.rollout.conftest import PLAN, Scene, release
from tests.unit.rollout.test_judge import SHIFTING, V2, T, write

BEGAN = 1000.0
WITH = replace(PLAN, baseline=True)
BASELINE = replace(release(1), baseline=True)
ARM = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=0.1, since=3)


def three_arms(slower: float = 1.0, baseline_slower: float = 1.0, seconds: float = 60) -> list[Request]:
    """At 10%: of stable's requests a ninth is answered by the baseline."""
    requests = Traffic(requests_per_s=200, share=0.1, slower=slower).requests(BEGAN, seconds)
    draw = np.random.default_rng(7)
    return [
        line._replace(arm="baseline", release=f"{STABLE}-baseline", us=(line.us or 0) * baseline_slower)
        if line.arm == "stable" and draw.random() < 1 / 9
        else line
        for line in requests
    ]


def test_its_name_can_be_parsed_and_is_not_a_model_name() -> None:
    assert BASELINE.name == "flights-v1-baseline"
    assert Release.parse(BASELINE.name) == BASELINE != release(1)
    with pytest.raises(NameInvalid):
        Release.parse("flights-v1-other")


def test_it_has_the_candidate_s_share_below_half_and_none_from_there_on(scene: Scene) -> None:
    scene.roll_out(Phase.PROMOTED, plan=WITH)
    scene.tick(3)
    pushed = [route for push in scene.router.pushes for route in push if route.baseline]
    shares = list(dict.fromkeys((route.candidate_percent, route.baseline_percent) for route in pushed))
    assert shares == [(5.0, 5.0), (50.0, 0.0), (100.0, 0.0)]
    assert scene.fleet.starts == ["flights-v1", "flights-v2", "flights-v1-baseline"]
    assert set(scene.fleet.stops) == {"flights-v1", "flights-v1-baseline"}
    assert scene.router.route("flights") == ModelRoute(model="flights", epoch=5, stable=release(2))


def test_it_is_stopped_with_a_candidate_that_is_rolled_back(scene: Scene) -> None:
    scene.judge.verdicts[5.0] = Verdict.FAIL
    scene.roll_out(Phase.ROLLED_BACK, plan=WITH)
    scene.tick(3)
    assert scene.fleet.running() == [release(1)]


def test_it_is_drained_before_it_is_stopped(scene: Scene) -> None:
    scene.promote_first()
    scene.command("start", 2, plan=WITH)
    scene.router.active["flights-v1-baseline"] = 3
    scene.until(Phase.DRAINING)
    scene.tick(6)
    assert BASELINE in scene.fleet.running()
    scene.router.active.clear()
    scene.until(Phase.PROMOTED)
    scene.tick(3)
    assert scene.fleet.running() == [release(2)]


def test_its_death_holds_the_rollout_until_it_is_back_and_is_nobody_s_fault(scene: Scene) -> None:
    scene.judge.step_s = 20.0
    scene.roll_out(Phase.SHIFTING, plan=WITH)
    scene.fleet.die(BASELINE)
    held = scene.until_true(lambda now: now.hold is Hold.INCIDENT)
    assert "flights-v1-baseline" in held.reason
    assert scene.until_true(lambda now: now.hold is None).epoch == held.epoch + 1
    assert scene.until(Phase.PROMOTED).candidate == release(2)


def test_its_death_excuses_no_candidate_that_fails(scene: Scene) -> None:
    """It may stay away for good: its third process may be what the machine has no memory for."""
    scene.judge.step_s = 20.0
    scene.roll_out(Phase.SHIFTING, plan=WITH)
    scene.fleet.die(BASELINE)
    scene.fleet.broken.add(BASELINE.name)
    scene.until_true(lambda now: now.hold is Hold.INCIDENT)
    scene.judge.verdicts[5.0] = Verdict.FAIL
    assert scene.until(Phase.ROLLED_BACK).verdict is Verdict.FAIL


def test_one_that_does_not_come_up_ends_the_rollout_before_any_traffic(scene: Scene) -> None:
    scene.fleet.broken.add("flights-v1-baseline")
    back = scene.roll_out(Phase.ROLLED_BACK, plan=WITH)
    assert "flights-v1-baseline" in back.reason
    assert scene.router.shares("flights") == [("flights-v1", 100.0)]


def test_status_names_it_with_its_share(scene: Scene) -> None:
    scene.judge.step_s = 20.0
    scene.roll_out(Phase.SHIFTING, plan=WITH)
    status = model_status(scene.home, "flights")
    assert [(found.version, found.arm, found.weight_percent) for found in status.releases] == [
        (1, "stable", 90.0), (1, "baseline", 5.0), (2, "candidate", 5.0),
    ]  # fmt: skip


def test_a_return_to_an_earlier_version_needs_none(scene: Scene) -> None:
    scene.roll_out(Phase.PROMOTED, plan=WITH)
    scene.fleet.starts.clear()
    scene.command("rollback")
    scene.until_true(lambda now: now.phase is Phase.PROMOTED and now.candidate == release(1))
    assert scene.fleet.starts == ["flights-v1"]


def test_the_control_is_what_went_to_the_baseline_and_nothing_else() -> None:
    requests = three_arms()
    block = cut(columns(requests, candidate=CANDIDATE, stable=STABLE), {3: 0.1}, Plan(baseline=True))
    of_baseline = sum(line.arm == "baseline" for line in requests)
    assert int(block.bins[2].sum()) == of_baseline
    assert int(block.bins[3].sum()) == block.candidate.requests
    assert block.stable.requests == len(requests) - block.candidate.requests
    assert block.splits[3] == (block.candidate.requests, len(requests))


@pytest.mark.parametrize(("baseline_slower", "rolled_back"), [(1.0, True), (3.0, False)])
def test_a_candidate_is_slow_when_it_is_slower_than_the_baseline(
    baseline_slower: float, rolled_back: bool
) -> None:
    """With little traffic both are slower than the busy process: that is the load's fault, not the version's."""
    plan = Plan(baseline=True)
    requests = three_arms(slower=3.0, baseline_slower=baseline_slower)
    worths = fold(Evidence(), requests, arm=ARM, plan=plan, now=BEGAN + 120).worths()
    assert (worths["p50"] > plan.rollback_at) is rolled_back
    thinned = fold(Evidence(), requests, arm=ARM, plan=Plan(), now=BEGAN + 120).worths()
    assert thinned["p50"] > plan.rollback_at


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"baseline": True, "steps": [50, 100]}, "no step of .50.0, 100.0. is below 50"),
        ({"baseline": "perhaps"}, "baseline"),
    ],
)
def test_a_spec_that_cannot_have_it_is_refused_with_the_reason(rollout: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RolloutSpec.model_validate(rollout)
    assert Plan.from_spec(RolloutSpec(baseline=True), ServingSpec(), ObjectivesSpec()).baseline


ASKS = replace(PLAN, second_opinion=True)


def test_a_candidate_that_was_slow_by_chance_is_started_again_and_promoted(scene: Scene) -> None:
    scene.judge.slow_by_chance = True
    turned = scene.roll_out(Phase.WITHDRAWING, plan=ASKS)
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
    scene.judge.slow_by_chance = True
    scene.judge.verdicts[5.0] = Verdict.FAIL
    now = scene.roll_out(Phase.ROLLED_BACK, plan=ASKS)
    assert (now.restarted, scene.fleet.starts.count("flights-v2")) == (True, 2)
    scene.tick(3)
    assert scene.fleet.running() == [release(1)]


def test_it_is_started_again_with_its_baseline_at_the_step_where_it_was(scene: Scene) -> None:
    plan = replace(ASKS, steps=(5.0, 25.0, 100.0), baseline=True)
    scene.roll_out(lambda now: now.weight_percent == 25, plan=plan)
    scene.judge.slow_by_chance = True
    scene.until(Phase.RESTARTING)
    scene.until_true(lambda now: now.weight_percent == 25)
    assert scene.fleet.starts.count("flights-v1-baseline") == 2
    scene.until(Phase.PROMOTED)


def test_a_person_may_abort_or_promote_while_it_is_started_again(tmp_path: Path) -> None:
    for command, end in (("abort", Phase.ROLLED_BACK), ("promote", Phase.PROMOTED)):
        for phase in (Phase.WITHDRAWING, Phase.RESTARTING):
            scene = Scene(tmp_path / f"{command}-{phase}")
            scene.judge.slow_by_chance = True
            scene.roll_out(phase, plan=ASKS)
            scene.command(command)  # type: ignore[arg-type]
            scene.until(end)
            scene.kill()


def test_mode_hold_asks_a_person_after_the_second_opinion(scene: Scene) -> None:
    scene.judge.slow_by_chance = True
    scene.judge.verdicts[5.0] = Verdict.FAIL
    assert scene.roll_out(lambda now: now.hold is Hold.FAILED, plan=replace(ASKS, mode="hold")).restarted


def test_a_server_that_cannot_be_started_again_is_rolled_back_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeFleet, "instance", lambda *_: None)
    scene.judge.slow_by_chance = True
    assert not scene.roll_out(Phase.ABORTING, plan=ASKS).restarted


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
    evidence = fold(Evidence(), traffic.requests(BEGAN, 30), arm=arm, plan=plan, now=BEGAN + 60)
    assert judge_step(plan, evidence, elapsed_s=30, last=False)[0] is Verdict.FAIL
    assert fails_by_latency_alone(plan, evidence) is alone


BAKING = replace(SHIFTING, phase=Phase.BAKING, step=1)
LIMIT = 0.17


def labels(mean: float, blocks: int, *, before: int = 0) -> QualityBlocks:
    """Blocks of a minute with this mean loss, and such with a terrible one from before the rollout."""
    old = [(T - 60.0 * number, 0.9, 50) for number in range(before)]
    new = [(T + 60.0 * (number + 1), mean, 50) for number in range(blocks)]
    return QualityBlocks(loss_name="brier", offline=0.15, limit=LIMIT, blocks=(*old, *new))


def judged(tmp_path: Path, blocks: QualityBlocks | None, rollout: Rollout = BAKING):  # type: ignore[no-untyped-def]
    log = tmp_path / "requests.jsonl"
    write(log, *(T + i / 4 for i in range(60)))
    return LogJudge(log, quality=lambda release: blocks if release == V2 else None).judge(rollout, T + 70)


def test_a_candidate_whose_answers_are_worse_than_allowed_fails_in_its_bake(tmp_path: Path) -> None:
    found = judged(tmp_path, labels(0.34, 30))
    assert found.verdict is Verdict.FAIL
    assert found.reason == (
        "its answers are worse than its quality objective allows; a good version looks like this in at most 1% of "
        "rollouts; its mean brier is 0.34 on 1500 labelled rows, at most 0.17 is allowed (0.15 on the test rows)"
    )
    journaled = json.loads(json.dumps(found.evidence))["guards"]["quality"]
    assert (journaled["rows"], journaled["limit"], journaled["e_value"] > 1000) == (1500, LIMIT, True)
    assert Evidence.from_json(found.evidence["guards"]).quality is not None
    assert not found.latency_alone


@pytest.mark.parametrize(
    "blocks",
    [
        None,
        labels(0.15, 500),
        labels(0.17, 500),
        labels(0.34, 3),
        labels(0.34, 0),
        labels(0.15, 20, before=200),
    ],
)
def test_it_passes_when_its_labels_are_good_too_few_or_of_an_earlier_rollout(
    tmp_path: Path, blocks: QualityBlocks | None
) -> None:
    assert judged(tmp_path, blocks).verdict is Verdict.PASS


def test_a_rollback_needs_no_labels(tmp_path: Path) -> None:
    asked = replace(BAKING, plan=replace(BAKING.plan, min_requests=0))
    found = judged(tmp_path, labels(0.34, 30), asked)
    assert found.verdict is Verdict.PASS
    assert "quality" not in found.evidence["guards"]


def test_the_guards_share_one_error_probability() -> None:
    plan = SHIFTING.plan
    bet = bet_on_quality([(T + 1, 0.34, 50)] * 30, since=T, loss_name="brier", offline=0.15, limit=LIMIT)
    with_labels, without = (weigh(plan, Evidence(quality=each)) for each in (bet, None))
    assert without.total == pytest.approx(1.0)
    assert with_labels.total == pytest.approx(0.8 + 0.2 * bet.e_value)
    assert not fails_by_latency_alone(plan, Evidence(quality=bet))


def test_a_candidate_at_the_limit_is_failed_no_more_often_than_the_spec_says() -> None:
    random, failed, rollouts = np.random.default_rng(5), 0, 500
    for _ in range(rollouts):
        means = random.binomial(20, LIMIT, 200) / 20
        worst = max(
            weigh(SHIFTING.plan, Evidence(quality=bet_on_quality(
                [(T + 1, float(mean), 20) for mean in means[:end]], since=T, loss_name="b", offline=0.15, limit=LIMIT
            ))).total
            for end in (50, 100, 150, 200)
        )  # fmt: skip
        failed += worst >= SHIFTING.plan.rollback_at
    assert failed <= 0.01 * rollouts


def test_evidence_goes_through_a_file_and_one_that_is_broken_is_none(tmp_path: Path) -> None:
    objects = HomeObjects(tmp_path)
    write_quality_blocks(objects, "flights", {"flights-v2": labels(0.2, 3)})
    assert read_quality_blocks(objects, "flights", "flights-v2") == labels(0.2, 3)
    assert read_quality_blocks(objects, "flights", Release(model="flights", version=1).name) is None
    (tmp_path / "watch" / "quality" / "flights" / "evidence.json").write_text("{")
    assert read_quality_blocks(objects, "flights", "flights-v2") is None


def test_a_rollout_in_its_bake_is_rolled_back_when_labels_come_that_are_worse(scene: Scene) -> None:
    objects = HomeObjects(scene.home)
    log = scene.home / "requests.jsonl"
    log.touch()
    scene.judge = LogJudge(log, quality=lambda it: read_quality_blocks(objects, it.model, it.name))  # type: ignore[assignment]
    scene.roll_out(Phase.BAKING, plan=Plan(steps=(100.0,), min_requests=1, bake_s=3600.0))
    write_quality_blocks(objects, "flights", {"flights-v2": labels(0.15, 0)})
    scene.tick(5)
    began = scene.clock.now()
    worse = tuple((began + 60.0 * number, 0.34, 50) for number in range(30))
    write_quality_blocks(objects, "flights", {"flights-v2": replace(labels(0.15, 0), blocks=worse)})
    scene.kill()  # another one resumes
    now = scene.until(Phase.ROLLED_BACK)
    assert now.live == Release(model="flights", version=1)
    scene.kill()
    decisions = home_rollouts(scene.home).decisions("flights")
    failed = next(each for each in decisions if each.verdict == "fail")
    assert "its mean brier is 0.34 on 1500 labelled rows, at most 0.17 is allowed" in failed.reason
    assert failed.evidence["guards"]["quality"]["blocks"] == 30
