from __future__ import annotations

from pathlib import Path

from serin.rollout.decide.state import Phase
from serin.rollout.run.status import ReleaseStatus, history, model_status, status
from tests.unit.rollout.conftest import Scene


def test_a_home_without_rollouts_has_no_models(tmp_path: Path) -> None:
    assert status(tmp_path) == []
    assert model_status(tmp_path, "flights") is None


def test_status_shows_the_split_while_a_rollout_runs(scene: Scene) -> None:
    scene.promote_first()
    scene.command("start", 2)
    scene.until_true(lambda now: now.weight_percent == 5)
    (model,) = status(scene.home)
    assert (model.name, model.live, model.previous) == ("flights", 1, None)
    assert model.releases == (
        ReleaseStatus(version=1, arm="stable", weight_percent=95.0),
        ReleaseStatus(version=2, arm="candidate", weight_percent=5.0),
    )
    assert (model.rollout.phase, model.rollout.running, model.rollout.step) == ("shifting", True, 0)


def test_status_after_the_end_shows_the_live_release_alone(scene: Scene) -> None:
    scene.promote_first()
    scene.command("start", 2)
    scene.until(Phase.PROMOTED)
    (model,) = status(scene.home)
    assert model.releases == (ReleaseStatus(version=2, arm="stable", weight_percent=100.0),)
    assert (model.live, model.previous, model.rollout.running) == (2, 1, False)


def test_status_needs_no_controller_and_disturbs_none(scene: Scene) -> None:
    scene.promote_first()
    before = (scene.home / "rollouts" / "flights" / "journal.jsonl").read_bytes()
    running = status(scene.home)
    scene.kill()
    assert status(scene.home) == running
    assert (scene.home / "rollouts" / "flights" / "journal.jsonl").read_bytes() == before


def test_history_can_be_had_for_one_rollout(scene: Scene) -> None:
    scene.promote_first()
    second = scene.command("start", 2)
    scene.until(Phase.PROMOTED)
    decisions = history(scene.home, "flights", second)
    assert {decision.rollout for decision in decisions} == {second}
    assert len(decisions) < len(history(scene.home, "flights"))
