"""A machine's clock that is set while a rollout runs: no deadline and no evidence may hang on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase
from serin.rollout.decide.verdict import Verdict
from serin.rollout.run.judge import LogJudge
from serin.rollout.run.ports import EvenClock
from tests.unit.rollout.conftest import Scene
from tests.unit.rollout.test_judge import SHIFTING as JUDGED
from tests.unit.rollout.test_judge import write_both

T = 10_000.0
SHIFTING = replace(
    JUDGED,
    plan=Plan(steps=(50.0, 80.0, 100.0), step_s=10.0, min_requests=20, warmup_s=0.0),
    began=T,
    since=T,
    evidence_from=T,
)


def test_time_passes_evenly_while_the_machine_s_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = [1_000_000.0]
    monkeypatch.setattr("time.time", lambda: wall[0])
    clock = EvenClock()
    before = clock.now()
    wall[0] += 3600
    assert clock.now() - before < 60
    clock.follow()
    assert 3599 < clock.now() - before < 3660
    wall[0] -= 7200
    clock.follow(not_before=before)
    assert 0 <= clock.now() - before + 1e-6 < 60


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_requests_are_judged_by_epoch_and_so_wherever_the_log_s_clock_was_set(
    tmp_path: Path, step_s: float
) -> None:
    log = tmp_path / "requests.jsonl"
    wall = [T]
    judge, now = LogJudge(log, lambda: wall[0]), SHIFTING
    for second in range(12):
        wall[0] = T + second + (step_s if second >= 4 else 0.0)
        write_both(log, *(wall[0] + part / 5 for part in range(5)))
        wall[0] += 1.0
        found = judge.judge(now, T + second + 1)
        now = replace(now, evidence=found.evidence)
    wall[0] += 10.0
    found = judge.judge(now, T + 22)
    assert found.evidence["guards"]["candidate"][0] == 60
    assert found.evidence["guards"]["blocks"] == 12
    assert found.verdict is Verdict.PASS


@pytest.mark.parametrize("behind_s", [-7200.0, 7200.0])
def test_a_rollout_takes_as_long_as_planned_however_the_clock_is_set(scene: Scene, behind_s: float) -> None:
    scene.promote_first()
    scene.command("start", 2)
    scene.until(Phase.SHIFTING)
    scene.clock.behind = behind_s
    assert scene.until(Phase.PROMOTED, ticks=60).candidate.version == 2
    scene.tick()
    assert scene.clock.now() == scene.clock.t - behind_s


def test_a_controller_that_restarts_with_its_clock_set_back_resumes_from_its_last_decision(
    scene: Scene,
) -> None:
    scene.promote_first()
    scene.command("start", 2)
    scene.until(Phase.SHIFTING)
    scene.kill()
    scene.clock.behind = 7200.0
    scene.clock.follow()
    assert scene.until(Phase.PROMOTED, ticks=60).candidate.version == 2
