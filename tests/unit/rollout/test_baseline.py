"""A second process of the stable version as the candidate's control, on request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from serin.errors import NameInvalid
from serin.formats.serving.request import Request
from serin.rollout.decide.blocks import columns, cut
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase
from serin.rollout.decide.verdict import Verdict
from serin.rollout.run.status import model_status
from serin.spec.rollout import RolloutSpec
from serin.store.artifacts import ModelRoute, Release
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic
from tests.unit.rollout.conftest import PLAN, Scene, release

T = 1000.0
WITH = replace(PLAN, baseline=True)
BASELINE = replace(release(1), baseline=True)
ARM = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=0.1, since=3)


def three_arms(slower: float = 1.0, baseline_slower: float = 1.0, seconds: float = 60) -> list[Request]:
    """At 10%: of stable's requests a ninth is answered by the baseline."""
    requests = Traffic(requests_per_s=200, share=0.1, slower=slower).requests(T, seconds)
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
    scene.promote_first()
    scene.command("start", 2, plan=WITH)
    scene.until(Phase.PROMOTED)
    scene.tick(3)
    pushed = [route for push in scene.router.pushes for route in push if route.baseline]
    shares = list(dict.fromkeys((route.candidate_percent, route.baseline_percent) for route in pushed))
    assert shares == [(5.0, 5.0), (50.0, 0.0), (100.0, 0.0)]
    assert scene.fleet.starts == ["flights-v1", "flights-v2", "flights-v1-baseline"]
    assert set(scene.fleet.stops) == {"flights-v1", "flights-v1-baseline"}
    assert scene.router.route("flights") == ModelRoute(model="flights", epoch=5, stable=release(2))


def test_it_is_stopped_with_a_candidate_that_is_rolled_back(scene: Scene) -> None:
    scene.promote_first()
    scene.judge.verdicts[5.0] = Verdict.FAIL
    scene.command("start", 2, plan=WITH)
    scene.until(Phase.ROLLED_BACK)
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
    scene.promote_first()
    scene.judge.step_s = 20.0
    scene.command("start", 2, plan=WITH)
    scene.until(Phase.SHIFTING)
    scene.fleet.die(BASELINE)
    held = scene.until_true(lambda now: now.hold is Hold.INCIDENT)
    assert "flights-v1-baseline" in held.reason
    assert scene.until_true(lambda now: now.hold is None).epoch == held.epoch + 1
    assert scene.until(Phase.PROMOTED).candidate == release(2)


def test_its_death_excuses_no_candidate_that_fails(scene: Scene) -> None:
    """It may stay away for good: its third process may be what the machine has no memory for."""
    scene.promote_first()
    scene.judge.step_s = 20.0
    scene.command("start", 2, plan=WITH)
    scene.until(Phase.SHIFTING)
    scene.fleet.die(BASELINE)
    scene.fleet.broken.add(BASELINE.name)
    scene.until_true(lambda now: now.hold is Hold.INCIDENT)
    scene.judge.verdicts[5.0] = Verdict.FAIL
    assert scene.until(Phase.ROLLED_BACK).verdict is Verdict.FAIL


def test_one_that_does_not_come_up_ends_the_rollout_before_any_traffic(scene: Scene) -> None:
    scene.promote_first()
    scene.fleet.broken.add("flights-v1-baseline")
    scene.command("start", 2, plan=WITH)
    back = scene.until(Phase.ROLLED_BACK)
    assert "flights-v1-baseline" in back.reason
    assert scene.router.shares("flights") == [("flights-v1", 100.0)]


def test_status_names_it_with_its_share(scene: Scene) -> None:
    scene.promote_first()
    scene.judge.step_s = 20.0
    scene.command("start", 2, plan=WITH)
    scene.until(Phase.SHIFTING)
    status = model_status(scene.home, "flights")
    assert status is not None
    assert [(found.version, found.arm, found.weight_percent) for found in status.releases] == [
        (1, "stable", 90.0), (1, "baseline", 5.0), (2, "candidate", 5.0),
    ]  # fmt: skip


def test_a_return_to_an_earlier_version_needs_none(scene: Scene) -> None:
    scene.promote_first()
    scene.command("start", 2, plan=WITH)
    scene.until(Phase.PROMOTED)
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
    worths = fold(Evidence(), requests, arm=ARM, plan=plan, now=T + 120).worths()
    assert (worths["p50"] > plan.rollback_at) is rolled_back
    thinned = fold(Evidence(), requests, arm=ARM, plan=Plan(), now=T + 120).worths()
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
    assert Plan.from_spec(RolloutSpec(baseline=True)).baseline
