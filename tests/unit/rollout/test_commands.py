"""Commands to a controller, its status, and how it places and verifies releases."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serin.cluster.agents import extend, place
from serin.rollout.decide.state import Hold, Phase, Rollout, Verdict
from serin.rollout.run.commands import Command, Kind, new_id
from serin.rollout.run.status import ReleaseStatus, history, model_status, status
from serin.store.artifacts import Release
from tests.fakes.rollout import FakeFleet
from tests.unit.rollout.conftest import PLAN, Scene


def test_ids_sort_by_time() -> None:
    ids = [new_id() for _ in range(50)]
    assert [each[:21] for each in ids] == sorted(each[:21] for each in ids)


def test_a_home_without_rollouts_has_no_models(tmp_path: Path) -> None:
    assert status(tmp_path) == []
    assert model_status(tmp_path, "flights") is None


def test_status_shows_the_split_while_a_rollout_runs(scene: Scene) -> None:
    scene.roll_out(lambda now: now.weight_percent == 5)
    (model,) = status(scene.home)
    assert (model.name, model.live, model.previous) == ("flights", 1, None)
    assert model.releases == (
        ReleaseStatus(version=1, arm="stable", weight_percent=95.0),
        ReleaseStatus(version=2, arm="candidate", weight_percent=5.0),
    )
    assert (model.rollout.phase, model.rollout.running, model.rollout.step) == ("shifting", True, 0)


def test_status_after_the_end_shows_the_live_release_alone(scene: Scene) -> None:
    scene.roll_out(Phase.PROMOTED)
    (model,) = status(scene.home)
    assert model.releases == (ReleaseStatus(version=2, arm="stable", weight_percent=100.0),)
    assert (model.live, model.previous, model.rollout.running) == (2, 1, False)


def contents(home: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}


def test_status_needs_no_controller_and_disturbs_none(scene: Scene) -> None:
    scene.promote_first()
    before = contents(scene.home)
    running = status(scene.home)
    scene.kill()
    assert status(scene.home) == running
    assert contents(scene.home) == before


def test_history_can_be_had_for_one_rollout(scene: Scene) -> None:
    scene.promote_first()
    second = scene.command("start", 2)
    scene.until(Phase.PROMOTED)
    decisions = history(scene.home, "flights", second)
    assert {decision.rollout for decision in decisions} == {second}
    assert len(decisions) < len(history(scene.home, "flights"))


HOSTS = st.sets(st.sampled_from("abcdefgh"))


@given(now=HOSTS, reporting=HOSTS, lost=HOSTS, replicas=st.none() | st.integers(1, 9))
def test_lost_hosts_leave_only_for_others_and_nobody_else_leaves(
    now: set[str], reporting: set[str], lost: set[str], replicas: int | None
) -> None:
    reporting -= lost  # a lost host is silent
    then = set(extend(sorted(now), "flights", reporting, replicas, lost))
    assert now - lost <= then, "a host that is there stays"
    assert then <= now | reporting
    wanted = len(now | reporting) if replicas is None else replicas
    assert len(then - lost) >= min(wanted, len((now - lost) | reporting)), "what can be replaced is"
    assert len(then - lost) <= max(wanted, len(now - lost)), "and no more than that"
    assert len(then) >= min(len(now), wanted), "no place is given up without another"


@given(hosts=HOSTS, lost=HOSTS, replicas=st.integers(1, 4))
def test_a_second_look_changes_nothing(hosts: set[str], lost: set[str], replicas: int) -> None:
    now = place("flights", hosts, replicas)
    once = extend(now, "flights", hosts - lost, replicas, lost)
    assert extend(once, "flights", hosts - lost, replicas, lost) == once


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


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[SlowToAnswer, Scene]]:
    """The first version is live; later ones answer when the gate is open."""
    fleet = SlowToAnswer()
    scene = Scene(tmp_path, fleet=fleet, beside=None)
    try:
        fleet.gate.set()
        scene.promote_first()
        fleet.gate.clear()
        yield fleet, scene
    finally:
        fleet.gate.set()
        scene.kill()


def test_what_a_verification_finds_after_its_rollout_was_aborted_is_forgotten(
    slow: tuple[SlowToAnswer, Scene],
) -> None:
    fleet, scene = slow
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


@pytest.mark.parametrize("load_s", [5.0, 20.0])
def test_golden_rows_that_are_never_answered_are_given_up(
    slow: tuple[SlowToAnswer, Scene], load_s: float
) -> None:
    _, scene = slow
    scene.command("start", 2, plan=replace(PLAN, load_s=load_s))
    now = scene.until(Phase.ABORTING)
    assert now.reason == f"flights-v2 did not answer its golden rows within {load_s:.0f} s"


def waits(now: Rollout) -> bool:
    return now.hold is Hold.APPROVAL


def test_where_every_rollout_needs_an_approval_a_plan_without_one_waits_for_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, approval=lambda: True)
    for version in (1, 2):  # also the first one, which would get all traffic at once
        scene.command("start", version)
        now = scene.until_true(waits)
        scene.tick(50)
        assert (now.candidate.version, now.phase, now.weight_percent) == (version, Phase.VERIFYING, 0.0)
        share = 5 if now.stable else 100
        assert now.reason.startswith(f"{share}% of traffic waits for approval; ")
        resumed = scene.command("resume")
        scene.tick()
        assert "approve it, or abort it" in scene.answer(resumed).reason
        scene.command("approve")
        scene.until(Phase.PROMOTED)
    scene.command("rollback")  # to what had been approved
    assert scene.until(Phase.PROMOTED).candidate.version == 1


def test_an_approval_that_is_asked_for_is_not_taken_from_the_inbox_by_any_name(tmp_path: Path) -> None:
    scene = Scene(tmp_path, approval=lambda: True)
    scene.command("start", 1)
    scene.until_true(waits)
    inbox = scene.home / "rollouts" / "inbox"
    for command in (
        Command(kind="approve", model="flights", by="ci"),
        Command(kind="promote", model="flights", by="ci"),
        Command(kind="rollback", model="flights", version=1, by="ci"),
    ):
        (inbox / f"{command.name}.json").write_bytes(command.dump())
        scene.tick()
        answer = scene.answer(command.id)
        assert not answer.accepted
        assert "rollouts/approvals/ alone" in answer.reason
    assert list(inbox.iterdir()) == []
    assert waits(scene.controller.rollouts()[0])


@pytest.mark.parametrize("kind", ["approve", "promote", "pause", "resume", "abort"])
def test_a_command_for_the_rollout_that_was_seen_does_not_land_on_the_one_after_it(
    tmp_path: Path, kind: Kind
) -> None:
    scene = Scene(tmp_path, approval=lambda: True)
    seen = scene.command("start", 1)
    scene.until_true(waits)
    scene.command("abort")
    scene.until(Phase.ROLLED_BACK)
    scene.command("start", 2)
    scene.until_true(waits)
    late = scene.command(kind, rollout=seen)
    other = scene.command(kind, 1)
    scene.tick()
    assert not scene.answer(late).accepted
    assert "another rollout has begun since, of version 2" in scene.answer(late).reason
    assert "the rollout that runs is of version 2" in scene.answer(other).reason
    assert waits(scene.controller.rollouts()[0])
    scene.command("approve", 2, rollout=scene.controller.rollouts()[0].id)
    assert scene.until(Phase.PROMOTED).candidate.version == 2


@pytest.mark.parametrize("seen", [None, "r1"])
def test_a_command_is_read_as_it_was_written(seen: str | None) -> None:
    command = Command(kind="approve", model="flights", by="ann", rollout=seen)
    assert Command.load(command.dump()) == command


def test_what_a_command_says_begins_no_line_of_a_log() -> None:
    command = Command(kind="pause", model="flights", by="ann\n12:00 bob", why="a\r\x1b[2Jb")
    found = Command.load(command.dump())
    assert (found.by, found.why) == ("ann 12:00 bob", "a  [2Jb")
