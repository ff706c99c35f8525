"""The controller: one rollout from its start to its end, whatever is commanded and whatever the clock does."""

from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import BundleUntrusted, JournalHeld
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Verdict
from serin.rollout.run.journal import StoreJournal
from serin.rollout.run.leadership import HomeLock
from serin.rollout.run.ports import EvenClock
from serin.rollout.run.status import history
from serin.store.artifacts import ModelRoute, Release
from tests.fakes.one_gateway import LogJudge
from tests.unit.rollout.conftest import PLAN, Scene, release
from tests.unit.rollout.test_judge import SHIFTING as JUDGED
from tests.unit.rollout.test_judge import write_both


def test_the_first_release_is_verified_and_then_live(scene: Scene) -> None:
    command = scene.command("start", 1)
    scene.until(Phase.PROMOTED)
    phases = [decision.phase for decision in history(scene.home, "flights")]
    assert scene.answer(command).accepted
    assert phases == ["pending", "loading", "verifying", "draining", "promoted"]
    assert scene.router.route("flights") == ModelRoute(model="flights", epoch=1, stable=release(1))
    assert scene.versions.aliases("flights") == {"live": 1}


def test_a_good_candidate_takes_over_step_by_step_and_the_old_release_goes(scene: Scene) -> None:
    scene.roll_out(Phase.PROMOTED)
    scene.tick()
    assert scene.router.shares("flights") == [
        ("flights-v1", 100), ("flights-v2", 5), ("flights-v2", 50), ("flights-v2", 100)
    ]  # fmt: skip
    assert scene.router.route("flights") == ModelRoute(model="flights", epoch=5, stable=release(2))
    assert (scene.fleet.running(), scene.fleet.stops) == ([release(2)], ["flights-v1"])
    assert scene.versions.aliases("flights") == {"live": 2, "previous": 1}


def test_a_step_waits_for_what_the_candidate_lacks_and_a_rollback_does_so_for_a_minute(scene: Scene) -> None:
    scene.roll_out(Phase.PROMOTED)
    scene.lacks = "1 of 3 replicas are ready"
    scene.command("start", 3)
    waiting = scene.until_true(lambda now: now.reason == scene.lacks)
    assert (waiting.phase, scene.router.shares("flights")[-1]) == (Phase.VERIFYING, ("flights-v2", 100))
    scene.lacks = ""
    scene.until(Phase.PROMOTED)
    scene.lacks = "1 of 3 replicas are ready"
    scene.command("rollback", 2)
    waits = scene.until(Phase.VERIFYING).since
    scene.until_true(lambda now: now.reason == scene.lacks)
    assert 60.0 <= scene.until(Phase.BAKING).since - waits <= 62.0
    assert scene.until(Phase.PROMOTED).live == release(2)


def test_a_first_release_waits_a_minute_for_its_replicas(scene: Scene) -> None:
    scene.lacks = "1 of 3 replicas are ready"
    scene.command("start", 1)
    waits = scene.until(Phase.VERIFYING).since
    scene.until_true(lambda now: now.reason == scene.lacks)
    assert 60.0 <= scene.until(Phase.DRAINING).since - waits <= 62.0


def test_the_aliases_say_who_is_candidate_while_it_is_one(scene: Scene) -> None:
    scene.roll_out(Phase.SHIFTING)
    assert scene.versions.aliases("flights") == {"live": 1, "candidate": 2}


def test_the_old_release_is_kept_until_the_bake_is_over(scene: Scene) -> None:
    scene.roll_out(Phase.BAKING)
    scene.tick(5)
    assert scene.fleet.running() == [release(1), release(2)]


@pytest.mark.parametrize("weight", [5.0, 50.0, 100.0])
def test_a_bad_candidate_is_rolled_back_within_the_tick(scene: Scene, weight: float) -> None:
    scene.roll_out(lambda now: now.weight_percent == weight)
    scene.judge.verdicts[weight] = Verdict.FAIL
    scene.tick()
    route = scene.router.route("flights")
    assert route
    assert (route.stable, route.candidate_percent) == (release(1), 0)
    scene.until(Phase.ROLLED_BACK)
    scene.tick()
    assert scene.fleet.running() == [release(1)]
    assert scene.versions.aliases("flights") == {"live": 1}


def test_a_dead_candidate_is_rolled_back_within_the_tick(scene: Scene) -> None:
    scene.roll_out(Phase.SHIFTING)
    scene.fleet.die(release(2))
    scene.tick()
    route = scene.router.route("flights")
    assert route
    assert route.candidate_percent == 0


def test_a_candidate_that_died_and_was_restarted_is_still_rolled_back(scene: Scene) -> None:
    scene.roll_out(Phase.SHIFTING)
    scene.tick()
    scene.fleet.restart(release(2))
    scene.tick()
    assert scene.until(Phase.ROLLED_BACK).live == release(1)


def test_a_candidate_that_hangs_is_rolled_back_in_seconds(scene: Scene) -> None:
    scene.judge.step_s = 100.0
    scene.roll_out(Phase.SHIFTING)
    scene.fleet.hang(release(2))
    now = scene.until(Phase.ABORTING, ticks=8)
    assert "not been ready" in now.reason


@pytest.mark.parametrize("trouble", ["broken", "wrong"])
@pytest.mark.parametrize("first", [True, False])
def test_a_candidate_that_cannot_start_or_answers_wrongly_gets_no_traffic(
    scene: Scene, trouble: str, first: bool
) -> None:
    if not first:
        scene.promote_first()
    getattr(scene.fleet, trouble).add("flights-v2")
    scene.command("start", 2)
    now = scene.until(Phase.ROLLED_BACK)
    scene.tick()
    assert "flights-v2" in now.reason
    assert scene.router.shares("flights") == ([] if first else [("flights-v1", 100)])
    assert scene.fleet.running() == ([] if first else [release(1)])


def test_a_release_under_use_is_drained_before_it_is_stopped(scene: Scene) -> None:
    scene.promote_first()
    scene.router.active["flights-v1"] = 3
    scene.command("start", 2)
    scene.until(Phase.DRAINING)
    scene.tick(10)
    assert scene.fleet.running() == [release(1), release(2)]
    scene.router.active.clear()
    scene.until(Phase.PROMOTED)


def test_a_candidate_that_is_known_not_to_fit_its_clients_gets_no_traffic(scene: Scene) -> None:
    scene.fleet.unlike.add("flights-v2")
    assert "not like flights-v1" in scene.roll_out(Phase.ROLLED_BACK).reason
    assert scene.router.shares("flights") == [("flights-v1", 100.0)]


def test_refused_commands_are_answered_with_the_reason_and_change_nothing(scene: Scene) -> None:
    scene.promote_first()
    lines = len(history(scene.home, "flights"))
    commands = {
        ("flights", scene.command("start", 1)): "live already",
        ("flights", scene.command("start", 9)): "version 9 is not in the store",
        ("boats", scene.command("start", 1, model="boats")): "version 1 is not in the store",
        ("flights", scene.command("pause")): "no rollout is running",
    }
    scene.tick()
    for (model, command), reason in commands.items():
        assert not scene.answer(command, model).accepted
        assert reason in scene.answer(command, model).reason
    assert len(history(scene.home, "flights")) == lines
    assert not (scene.home / "rollouts" / "boats").exists()


def test_a_second_rollout_is_refused_while_the_first_one_runs(scene: Scene) -> None:
    scene.roll_out(Phase.SHIFTING)
    second = scene.command("start", 3)
    now = scene.until(Phase.PROMOTED)
    assert "version 2 is shifting" in scene.answer(second).reason
    assert now.candidate == release(2)


def test_pause_holds_the_weights_and_resume_continues(scene: Scene) -> None:
    scene.roll_out(Phase.SHIFTING)
    scene.command("pause", why="a look at the dashboards")
    scene.tick(40)
    now = scene.controller.rollouts()[0]
    assert (now.hold, now.weight_percent, now.reason) == (
        Hold.PAUSED,
        5,
        "pause by ann: a look at the dashboards",
    )
    scene.command("resume")
    scene.until(Phase.PROMOTED)


def test_no_traffic_holds_until_it_comes(scene: Scene) -> None:
    scene.judge.verdicts[5.0] = Verdict.NO_TRAFFIC
    scene.roll_out(lambda now: now.hold is Hold.NO_TRAFFIC)
    scene.tick(20)
    del scene.judge.verdicts[5.0]
    scene.until(Phase.PROMOTED)


def test_back_during_the_bake_is_instant(scene: Scene) -> None:
    scene.judge.bake_s = 100.0
    scene.roll_out(Phase.BAKING)
    scene.command("rollback")
    scene.tick()
    route = scene.router.route("flights")
    assert route
    assert (route.stable, route.candidate_percent) == (release(1), 0)
    assert scene.fleet.starts == ["flights-v1", "flights-v2"]


def test_back_after_the_end_starts_the_old_version_and_gives_it_everything(scene: Scene) -> None:
    scene.roll_out(Phase.PROMOTED)
    command = scene.command("rollback")
    scene.until(Phase.BAKING)
    assert scene.answer(command).accepted
    assert scene.router.shares("flights")[-1] == ("flights-v1", 100)
    scene.until(Phase.PROMOTED)
    scene.tick()
    assert scene.fleet.running() == [release(1)]
    assert scene.versions.aliases("flights") == {"live": 1, "previous": 2}


def test_an_edition_takes_all_traffic_at_once_and_gives_it_back_to_the_one_before(scene: Scene) -> None:
    scene.versions.published["flights"] = (1, "1e2")
    scene.promote_first()
    scene.command("start", 1, edition=2, plan=PLAN.at_once())
    scene.until(Phase.BAKING)
    assert set(scene.fleet.running()) == {release(1), replace(release(1), edition=2)}
    assert scene.router.shares("flights")[-1] == ("flights-v1e2", 100)
    scene.until(Phase.PROMOTED)
    scene.tick()
    assert scene.fleet.running() == [replace(release(1), edition=2)]
    assert scene.versions.aliases("flights") == {"live": "1e2", "previous": 1}
    scene.command("rollback")
    scene.until(Phase.PROMOTED)
    scene.tick()
    assert scene.fleet.running() == [release(1)]
    assert scene.versions.aliases("flights") == {"live": 1, "previous": "1e2"}
    command = scene.command("start", 1, edition=3)
    scene.tick()
    assert scene.answer(command).reason.endswith("version 1e3 is not in the store")


def test_a_live_release_that_is_gone_is_restarted_at_once_and_routed_again(scene: Scene) -> None:
    scene.promote_first()
    pushes = len(scene.router.pushes)
    scene.fleet.stop(release(1))
    scene.tick()
    assert scene.fleet.starts == ["flights-v1"] * 2
    assert len(scene.router.pushes) > pushes


def test_a_live_release_that_does_not_answer_is_left_to_recover_before_it_is_started_again(
    scene: Scene,
) -> None:
    scene.promote_first()
    scene.tick()
    scene.fleet.die(release(1))
    scene.tick(15)
    assert scene.fleet.starts == ["flights-v1"]
    scene.tick(10)
    assert scene.fleet.starts == ["flights-v1"] * 2
    assert scene.fleet.state(release(1)) == "ready"


def test_a_live_release_that_dies_again_and_again_is_started_less_and_less_often(scene: Scene) -> None:
    scene.promote_first()
    for _ in range(120):
        scene.fleet.die(release(1))
        scene.tick()
    assert 3 <= len(scene.fleet.starts) <= 7


def test_a_new_controller_starts_a_dead_live_release_at_once(scene: Scene) -> None:
    scene.promote_first()
    scene.kill()
    scene.fleet.die(release(1))
    scene.tick()
    assert scene.fleet.starts == ["flights-v1"] * 2


def test_trouble_with_the_stable_release_holds_the_rollout(scene: Scene) -> None:
    scene.roll_out(Phase.SHIFTING)
    scene.fleet.hang(release(1))
    scene.judge.step_s = 1000.0
    now = scene.until_true(lambda now: now.hold is Hold.INCIDENT)
    assert now.weight_percent == 5


def test_routes_are_pushed_again_although_nothing_changed(scene: Scene) -> None:
    scene.promote_first()
    pushes = len(scene.router.pushes)
    scene.tick(21)
    assert 2 <= len(scene.router.pushes) - pushes <= 3


def test_a_gateway_that_refuses_holds_the_rollout_and_stops_nothing(scene: Scene) -> None:
    scene.roll_out(Phase.SHIFTING)
    scene.router.refusing = True
    scene.until_true(lambda now: now.hold is Hold.INCIDENT)
    scene.tick(20)
    assert scene.fleet.stops == []
    scene.router.refusing = False
    scene.until(Phase.PROMOTED)


def test_a_candidate_is_not_stopped_before_its_traffic_is_gone(scene: Scene) -> None:
    scene.roll_out(Phase.SHIFTING)
    scene.router.refusing = True
    scene.command("abort")
    scene.tick(30)
    assert scene.fleet.running() == [release(1), release(2)]
    scene.router.refusing = False
    scene.until(Phase.ROLLED_BACK)


def test_two_models_roll_out_side_by_side(scene: Scene) -> None:
    scene.promote_first()
    scene.promote_first(model="taxis")
    scene.judge.verdicts[50.0] = Verdict.WAIT
    scene.command("start", 2)
    scene.command("start", 2, model="taxis")
    scene.until_true(lambda now: now.weight_percent == 50.0)
    scene.command("abort", model="taxis")
    scene.until(Phase.ROLLED_BACK, model="taxis")
    assert [route.model for route in scene.router.pushes[-1]] == ["flights", "taxis"]
    assert scene.router.shares("flights")[-1] == ("flights-v2", 50)
    assert scene.router.shares("taxis")[-1] == ("taxis-v1", 100)


def test_a_model_whose_live_release_cannot_start_does_not_keep_others_from_traffic(scene: Scene) -> None:
    scene.promote_first()
    scene.promote_first(model="taxis")
    scene.kill()
    scene.fleet.stop(release(1))
    scene.fleet.broken.add("flights-v1")
    scene.tick(3)
    assert [route.model for route in scene.router.pushes[-1]] == ["taxis"]


def test_tick_moves_no_traffic_when_the_decision_cannot_be_recorded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.roll_out(Phase.VERIFYING)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr(StoreJournal, "append", full)
        scene.tick(3)
        assert "disk full" in scene.controller.problems["flights"]
    assert scene.router.shares("flights") == [("flights-v1", 100)]
    scene.until(Phase.PROMOTED)


def test_only_one_controller_decides_for_a_home(tmp_path: Path) -> None:
    with HomeLock(tmp_path), pytest.raises(JournalHeld, match="another rollout controller"):
        HomeLock(tmp_path)
    HomeLock(tmp_path).close()


def test_a_rollout_of_a_release_that_must_not_run_is_refused_before_it_begins(tmp_path: Path) -> None:
    def check(release: Release) -> None:
        if release.version == 2:
            raise BundleUntrusted(release=release.name, reason="it is not signed")

    scene = Scene(tmp_path, check=check)
    scene.promote_first()
    command = scene.command("start", 2)
    scene.tick()
    answer = scene.answer(command)
    assert not answer.accepted
    assert "flights-v2 cannot be loaded: it is not signed" in answer.reason
    assert len({decision.rollout for decision in history(tmp_path, "flights")}) == 1
    scene.controller.close()


def test_evidence_is_journaled_now_and_then_although_nothing_is_decided(scene: Scene) -> None:
    scene.judge.step_s = 1000.0
    scene.roll_out(Phase.SHIFTING)
    lines = len(history(scene.home, "flights"))
    scene.tick(500)
    more = history(scene.home, "flights")[lines:]
    assert 15 <= len(more) <= 30
    assert more[-1].evidence["looks"] > 300


def test_mode_observe_leaves_the_weights_to_a_person(scene: Scene) -> None:
    scene.roll_out(Phase.SHIFTING, plan=replace(PLAN, mode="observe"))
    scene.tick(40)
    assert scene.router.shares("flights")[-1] == ("flights-v2", 5)
    scene.command("promote")
    scene.until(Phase.BAKING)
    scene.command("promote")
    scene.until(Phase.PROMOTED)


def test_a_bake_without_traffic_holds_and_begins_again_when_there_is_some(scene: Scene) -> None:
    scene.judge.verdicts[100.0] = Verdict.NO_TRAFFIC
    now = scene.roll_out(lambda now: now.hold is Hold.NO_TRAFFIC, plan=replace(PLAN, steps=(100.0,)))
    scene.tick(60)
    assert scene.controller.rollouts()[0].phase is Phase.BAKING
    del scene.judge.verdicts[100.0]
    scene.tick()
    again = scene.controller.rollouts()[0]
    assert (again.hold, again.since > now.since) == (None, True)
    scene.until(Phase.PROMOTED)


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
    scene.roll_out(Phase.SHIFTING)
    scene.clock.behind = behind_s
    assert scene.until(Phase.PROMOTED, ticks=60).candidate.version == 2
    scene.tick()
    assert scene.clock.now() == scene.clock.t - behind_s


def test_a_controller_that_restarts_with_its_clock_set_back_resumes_from_its_last_decision(
    scene: Scene,
) -> None:
    scene.roll_out(Phase.SHIFTING)
    scene.kill()
    scene.clock.behind = 7200.0
    scene.clock.follow()
    assert scene.until(Phase.PROMOTED, ticks=60).candidate.version == 2
