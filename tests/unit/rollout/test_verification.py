from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from serin.rollout.decide.state import Phase
from serin.rollout.decide.verdict import Verdict
from serin.store.artifacts import Release
from tests.fakes.rollout import FakeFleet
from tests.unit.rollout.conftest import PLAN, Scene


@dataclass
class SlowToAnswer(FakeFleet):
    """Its golden rows are not answered while the gate is closed."""

    gate: threading.Event = field(default_factory=threading.Event)
    asked: list[str] = field(default_factory=list)

    def verify(self, release: Release) -> None:
        self.asked.append(release.name)
        assert self.gate.wait(60)
        super().verify(release)


def tick(scene: Scene, count: int = 1) -> None:
    """A tick that waits for golden rows does not end: the test must not wait with it."""
    done = threading.Event()

    def run() -> None:
        scene.tick(count)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    assert done.wait(20), "the tick waits for a verification"


def test_golden_rows_that_take_long_hold_up_no_other_model_s_rollback(tmp_path: Path) -> None:
    fleet = SlowToAnswer()
    fleet.gate.set()
    scene = Scene(tmp_path, fleet=fleet, beside=None)
    try:
        for model in ("flights", "taxis"):
            scene.promote_first(model=model)
        scene.judge.step_s = 1000.0
        scene.command("start", 2, model="taxis", plan=PLAN)
        scene.until(Phase.SHIFTING, model="taxis")
        fleet.gate.clear()
        scene.command("start", 2)
        for _ in range(8):
            tick(scene)
        phases = {now.model: now.phase for now in scene.controller.rollouts()}
        assert phases == {"flights": Phase.VERIFYING, "taxis": Phase.SHIFTING}
        scene.judge.verdicts[5.0] = Verdict.FAIL
        tick(scene)
        route = scene.router.route("taxis")
        assert route
        assert route.candidate_percent == 0
        assert fleet.asked.count("flights-v2") == 1, "asked once, not in each tick"
        fleet.gate.set()
        settle(scene, Phase.ABORTING)  # the judge now says the same of its first step
    finally:
        fleet.gate.set()
        scene.kill()


def settle(scene: Scene, phase: Phase) -> None:
    """Until the thread has told; real time passes, the scene's with it."""
    for _ in range(200):
        scene.tick()
        if any(now.model == "flights" and now.phase is phase for now in scene.controller.rollouts()):
            return
        time.sleep(0.01)
    raise AssertionError(f"not reached: {scene.said[-3:]}")


def test_what_a_verification_finds_after_its_rollout_was_aborted_is_forgotten(tmp_path: Path) -> None:
    fleet = SlowToAnswer()
    scene = Scene(tmp_path, fleet=fleet, beside=None)
    try:
        fleet.gate.set()
        scene.promote_first()
        fleet.gate.clear()
        fleet.wrong.add("flights-v2")
        scene.command("start", 2)
        scene.until(Phase.VERIFYING)
        scene.tick()
        scene.command("abort")
        assert scene.until(Phase.ROLLED_BACK).reason == "abort by ann"
        fleet.wrong.clear()
        fleet.gate.set()
        scene.command("start", 2)
        settle(scene, Phase.SHIFTING)
    finally:
        fleet.gate.set()
        scene.kill()


@pytest.mark.parametrize("load_s", [5.0, 20.0])
def test_golden_rows_that_are_never_answered_are_given_up(tmp_path: Path, load_s: float) -> None:
    fleet = SlowToAnswer()
    scene = Scene(tmp_path, fleet=fleet, beside=None)
    try:
        fleet.gate.set()
        scene.promote_first()
        fleet.gate.clear()
        scene.command("start", 2, plan=replace(PLAN, load_s=load_s))
        now = scene.until(Phase.ABORTING)
        assert now.reason == f"flights-v2 did not answer its golden rows within {load_s:.0f} s"
    finally:
        fleet.gate.set()
        scene.kill()
