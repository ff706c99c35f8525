"""A model is taken out of service: no route, no process, nothing live, and it stays so until somebody rolls it out."""

import pytest

from serin.errors import RolloutRefused
from serin.rollout.decide.state import Phase
from serin.rollout.run.apply_command import apply_command
from serin.rollout.run.commands import Kind
from serin.rollout.run.status import model_status
from tests.unit.rollout.conftest import Scene, release
from tests.unit.rollout.test_advance import RUNNING, T, command, rollout


def test_a_retired_model_has_no_route_no_process_and_no_live_version(scene: Scene) -> None:
    scene.promote_first()
    scene.promote_first(model="taxis")
    retire = scene.command("retire", why="replaced by taxis")
    scene.until(Phase.RETIRED)
    scene.tick(3)
    assert scene.answer(retire).accepted
    assert (scene.router.route("flights"), scene.fleet.running()) == (None, [release(1, "taxis")])
    assert scene.versions.aliases("flights") == {"previous": 1}
    status = model_status(scene.home, "flights")
    assert (status.live, status.releases, status.rollout.phase) == (None, (), "retired")
    assert status.rollout.reason.endswith(": replaced by taxis")
    route = scene.router.route("taxis")
    assert route is not None, "another model is still served"


def test_requests_in_flight_are_finished_before_the_process_is_stopped(scene: Scene) -> None:
    scene.promote_first()
    scene.router.active["flights-v1"] = 3
    scene.command("retire")
    scene.until(Phase.RETIRING)
    scene.tick(6)
    assert (scene.router.route("flights"), scene.fleet.running()) == (None, [release(1)])
    scene.router.active["flights-v1"] = 0
    scene.until(Phase.RETIRED)
    scene.tick(2)
    assert scene.fleet.running() == []


def test_a_new_controller_does_not_start_a_retired_model(scene: Scene) -> None:
    scene.promote_first()
    scene.command("retire")
    scene.until(Phase.RETIRED)
    scene.tick(3)
    scene.kill()
    starts = list(scene.fleet.starts)
    scene.tick(20)
    assert (scene.fleet.starts, scene.router.route("flights")) == (starts, None)


@pytest.mark.parametrize(("kind", "version"), [("start", 2), ("rollback", None)])
def test_a_retired_model_is_served_again_by_a_rollout(scene: Scene, kind: Kind, version: int | None) -> None:
    scene.promote_first()
    scene.command("retire")
    scene.until(Phase.RETIRED)
    scene.command(kind, version)
    now = scene.until(Phase.PROMOTED)
    assert now.live == release(version or 1)


@pytest.mark.parametrize("phase", RUNNING)
def test_a_model_is_not_retired_during_a_rollout(phase: Phase) -> None:
    with pytest.raises(RolloutRefused, match="serin rollout abort flights"):
        apply_command(rollout(phase), command("retire"), T)


def test_only_what_is_served_can_be_retired_and_nothing_disturbs_it() -> None:
    for now in (None, rollout(Phase.ROLLED_BACK, stable=None), rollout(Phase.RETIRED, stable=None)):
        with pytest.raises(RolloutRefused, match="no version of it is served"):
            apply_command(now, command("retire"), T)
    kinds: tuple[Kind, ...] = ("pause", "promote", "abort", "rollback")
    for kind in kinds:
        with pytest.raises(RolloutRefused, match="being taken out of service"):
            apply_command(rollout(Phase.RETIRING, stable=None), command(kind), T)
