from __future__ import annotations

from dataclasses import replace

from serin.rollout.decide.state import Hold, Phase
from serin.rollout.decide.verdict import Verdict
from tests.unit.rollout.conftest import PLAN, Scene


def test_a_bake_without_traffic_holds_and_begins_again_when_there_is_some(scene: Scene) -> None:
    scene.promote_first()
    scene.judge.verdicts[100.0] = Verdict.NO_TRAFFIC
    scene.command("start", 2, plan=replace(PLAN, steps=(100.0,)))
    now = scene.until_true(lambda now: now.hold is Hold.NO_TRAFFIC)
    scene.tick(60)
    assert scene.controller.rollouts()[0].phase is Phase.BAKING
    del scene.judge.verdicts[100.0]
    scene.tick()
    again = scene.controller.rollouts()[0]
    assert (again.hold, again.since > now.since) == (None, True)
    scene.until(Phase.PROMOTED)
