"""A disk that takes nothing more: traffic goes back, commands are obeyed, and it is said why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serin.machine.in_memory import write_problems
from serin.rollout.decide.state import Phase
from serin.rollout.decide.verdict import Verdict
from serin.rollout.run.status import history, model_status, problems
from tests.fakes.full_disk import full_disk
from tests.unit.rollout.conftest import PLAN, Scene, release


@pytest.fixture
def full(tmp_path: Path) -> Scene:
    """A rollout at its first step; its stack has a folder in memory."""
    home, memory = tmp_path / "home", tmp_path / "memory"
    (home / "stack").mkdir(parents=True)
    memory.mkdir()
    (home / "stack" / "sockets").symlink_to(memory)
    scene = Scene(home)
    scene.promote_first()
    scene.judge.step_s = 1000.0
    scene.command("start", 2)
    scene.until(Phase.SHIFTING)
    return scene


def share(scene: Scene) -> float:
    route = scene.router.route("flights")
    assert route
    return route.candidate_percent


def test_a_bad_candidate_loses_its_traffic_within_the_tick_and_that_is_recorded_later(full: Scene) -> None:
    before = history(full.home, "flights")
    with full_disk(full.home) as refused:
        full.judge.verdicts[5.0] = Verdict.FAIL
        full.tick()
        assert (share(full), bool(refused)) == (0.0, True)
        full.until(Phase.ROLLED_BACK)
        found = model_status(full.home, "flights")
        assert found
        assert (found.live, found.rollout.phase) == (1, "rolled_back"), "status knows it at once"
        assert "journal.jsonl" in full.controller.problems["flights"]
        assert "No space left on device" in full.controller.problems["flights"]
    full.tick()
    assert [decision.phase for decision in history(full.home, "flights")[len(before) :]] == [
        "aborting",
        "rolled_back",
    ]
    full.kill()
    (full.home / "stack" / "sockets").unlink()
    assert history(full.home, "flights")[-1].phase == "rolled_back", "now the disk has it"
    assert full.tick() is None
    assert full.controller.problems == {}


def test_a_controller_that_is_killed_in_between_does_not_give_the_traffic_back(full: Scene) -> None:
    with full_disk(full.home):
        full.command("abort")
        full.tick()
        assert share(full) == 0.0
        full.kill()
        full.tick(2)
        assert share(full) == 0.0
    full.until(Phase.ROLLED_BACK)
    assert [d.seq for d in history(full.home, "flights")] == sorted(
        {d.seq for d in history(full.home, "flights")}
    )


def test_abort_is_obeyed_and_answered_although_no_file_can_be_written(full: Scene) -> None:
    with full_disk(full.home):
        command = full.command("abort")
        full.tick()
        assert full.answer(command).accepted
        assert share(full) == 0.0
        full.tick(3)
    full.until(Phase.ROLLED_BACK)
    assert [decision.command for decision in history(full.home, "flights")].count(command) == 1


@pytest.mark.parametrize("kind", ["promote", "pause"])
def test_what_does_not_go_back_is_refused_with_the_reason(full: Scene, kind: str) -> None:
    with full_disk(full.home):
        command = full.command(kind)  # type: ignore[arg-type]
        full.tick()
        answer = full.answer(command)
        assert (answer.accepted, share(full)) == (False, 5.0)
        assert "No space left on device" in answer.reason


def test_the_other_models_are_looked_at_in_the_same_round(
    full: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    full.judge.step_s = 0.0
    full.command("start", 1, model="taxis", plan=replace(PLAN, steps=(100.0,)))
    with full_disk(full.home / "rollouts" / "flights"):
        full.until(Phase.PROMOTED, model="taxis")
        assert share(full) == 5.0, "a step forward waits for its record"
    full.until(Phase.PROMOTED)


@pytest.mark.parametrize(("mode", "left"), [("enforce", 0.0), ("hold", 5.0)])
def test_a_candidate_whose_rollout_cannot_be_recorded_for_long_loses_its_traffic(
    full: Scene, mode: str, left: float
) -> None:
    full.command("abort")
    full.until(Phase.ROLLED_BACK)
    full.command("start", 3, plan=replace(PLAN, mode=mode))
    full.until(Phase.SHIFTING)
    with full_disk(full.home):
        full.tick(2 * 60)
        assert share(full) == left
        assert "flights" in full.controller.problems
        write_problems(full.home, "controller", full.controller.problems)
        assert "journal.jsonl" in problems(full.home)["flights"], "without a word from the disk"
    full.tick()
    assert full.controller.problems == {}
    assert release(1) in full.fleet.running()
