"""What a controller survives: its end at every effect, a full disk, lost processes, and a shorter journal."""

import copy
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from serin.formats.serving.journal import Decision
from serin.machine.in_memory import write_problems
from serin.reports.rollout_page import story2html
from serin.rollout.decide.advance import Seen, advance
from serin.rollout.decide.plan import Plan, ShadowPlan
from serin.rollout.decide.state import Hold, Phase, Rollout, Verdict, restored
from serin.rollout.decide.verdict import Judgement
from serin.rollout.run.access import home_rollouts
from serin.rollout.run.controller import worth_keeping
from serin.rollout.run.record import decision2rollout
from serin.rollout.run.status import history, model_status, problems
from serin.rollout.run.story import tell
from serin.store.artifacts import Release
from tests.fakes.full_disk import full_disk
from tests.fakes.rollout import Bomb, Crash, FakeJudge
from tests.unit.rollout.conftest import PLAN, Scene, release


@dataclass(frozen=True)
class Story:
    """What happens after so many versions were live, with this trouble on the way."""

    command: tuple[Any, ...]
    end: Phase
    live: int = 1
    trouble: Callable[[Scene], object] = lambda _: None
    plan: Plan = PLAN
    effects: frozenset[str] = frozenset(("append", "apply", "start", "verify", "set_alias", "answer"))

    def prepare(self, scene: Scene) -> None:
        if self.live == 1:
            scene.promote_first()
        elif self.live == 2:
            scene.roll_out(Phase.PROMOTED)
            scene.tick(3)
        self.trouble(scene)


START, SHADOW = ("start", 2), ShadowPlan(rows=300, time_s=0.0)
STORIES = {
    "the first release": Story(("start", 1), Phase.PROMOTED, live=0),
    "a promotion": Story(START, Phase.PROMOTED),
    "a rollback": Story(
        START, Phase.ROLLED_BACK, trouble=lambda scene: scene.judge.verdicts.update({50.0: Verdict.FAIL})
    ),
    "a candidate that answers wrongly": Story(
        START, Phase.ROLLED_BACK, trouble=lambda scene: scene.fleet.wrong.add("flights-v2")
    ),
    "a second opinion": Story(
        START,
        Phase.PROMOTED,
        trouble=lambda scene: setattr(scene.judge, "slow_by_chance", True),
        plan=replace(PLAN, steps=(50.0, 100.0), second_opinion=True),
    ),
    "recorded requests first": Story(
        START, Phase.PROMOTED, plan=replace(PLAN, steps=(50.0, 100.0), shadow=SHADOW)
    ),
    "recorded requests answered wrongly": Story(
        START,
        Phase.ROLLED_BACK,
        trouble=lambda scene: setattr(scene.replayer, "wrong_at", 2),
        plan=replace(PLAN, shadow=SHADOW),
    ),
    "back to the version before": Story(("rollback",), Phase.PROMOTED, live=2),
    "a retirement": Story(
        ("retire",),
        Phase.RETIRED,
        live=2,
        effects=frozenset(("append", "apply", "stop", "set_alias", "answer")),
    ),
}


def run(scene: Scene, story: Story) -> dict[str, Any]:
    """The story's command to its end and a few ticks more, with a fresh controller after each crash."""
    plan = story.plan if story.command[0] == "start" else None
    command = scene.command(*story.command, plan=plan)
    after_end = 0
    for _ in range(100):
        try:
            scene.tick()
        except Crash:
            scene.kill()
            scene.clock.t += 0.5
            continue
        now = scene.controller.rollouts()
        if now and now[0].phase is story.end and now[0].id == command:
            after_end += 1
        if after_end > 3:
            scene.kill()
            return outcome(scene, command)
    raise AssertionError(f"{story.end} was not reached: {scene.said[-5:]}")


def outcome(scene: Scene, command: str) -> dict[str, Any]:
    decisions = history(scene.home, "flights")
    return {
        "shares": scene.router.shares("flights"),
        "route": scene.router.route("flights"),
        "running": scene.fleet.running(),
        "aliases": scene.versions.aliases("flights"),
        "obeyed": [decision.command for decision in decisions].count(command),
        "accepted": scene.answer(command).accepted,
        "waiting": list((scene.home / "rollouts" / "inbox").iterdir()),
    }


def copied(scene: Scene, home: Path, bomb: Bomb) -> Scene:
    shutil.copytree(scene.home, home)
    parts = {
        name: copy.deepcopy(getattr(scene, name))
        for name in ("clock", "fleet", "judge", "versions", "replayer")
    }
    router = copy.copy(scene.router)
    router.pushes = list(router.pushes)
    return Scene(home, router=router, bomb=bomb, **parts)


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES.keys())
def test_a_crash_at_any_effect_changes_nothing_of_the_outcome(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A killed process loses nothing it wrote; half of the time is this.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    (tmp_path / "before").mkdir()
    before = Scene(tmp_path / "before")
    story.prepare(before)
    before.kill()
    calm = copied(before, tmp_path / "calm", Bomb())
    expected, effects = run(calm, story), calm.bomb.log
    assert story.effects <= set(effects)

    for at, effect in enumerate(effects, start=1):
        for after in (False, True):
            scene = copied(before, tmp_path / f"{at}-{after}", Bomb(at=at, after=after))
            assert run(scene, story) == expected, f"crash {'after' if after else 'before'} {effect} ({at})"


def test_a_decision_whose_writing_was_not_completed_was_not_made(scene: Scene) -> None:
    scene.roll_out(lambda now: now.weight_percent == 5)
    scene.kill()
    decisions = scene.home / "rollouts" / "flights" / "decisions"
    scratch = decisions / f".{len(list(decisions.iterdir())) + 1:012d}.json.0123456789ab"
    scratch.write_bytes(
        b'{"format":"serin.decision","version":1,"decision":{"t":1000009.0,"weight":50.0,"verd'
    )
    scene.tick()
    assert scene.router.shares("flights")[-1] == ("flights-v2", 5)
    scene.until(Phase.PROMOTED)


def test_a_candidate_that_died_with_its_controller_is_rolled_back_by_the_next(scene: Scene) -> None:
    scene.roll_out(Phase.SHIFTING)
    scene.kill()
    scene.fleet.stop(release(2))
    scene.tick()
    now = scene.controller.rollouts()[0]
    assert (now.phase, now.reason) == (Phase.ABORTING, "flights-v2 is not running")
    assert scene.router.shares("flights")[-1] == ("flights-v1", 100)


@pytest.fixture
def full(tmp_path: Path) -> Scene:
    """A rollout at its first step; its stack has a folder in memory."""
    home, memory = tmp_path / "home", tmp_path / "memory"
    (home / "stack").mkdir(parents=True)
    memory.mkdir()
    (home / "stack" / "sockets").symlink_to(memory)
    scene = Scene(home)
    scene.judge.step_s = 1000.0
    scene.roll_out(Phase.SHIFTING)
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
        assert "decisions" in full.controller.problems["flights"]
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


def test_the_other_models_are_looked_at_in_the_same_round(full: Scene) -> None:
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
        assert "decisions" in problems(full.home)["flights"], "without a word from the disk"
    full.tick()
    assert full.controller.problems == {}
    assert release(1) in full.fleet.running()


OLD, NEW = Release(model="churn", version=1), Release(model="churn", version=2)
GONE = Seen(candidate="absent", stable_ready=False)


def rollout(phase: Phase, step: int | None = 1) -> Rollout:
    return Rollout(
        id="r", candidate=NEW, stable=OLD, previous=None, plan=Plan(), phase=phase, step=step, epoch=7,
        began=1.0, since=2.0, evidence_from=2.0, reason="as it was",
    )  # fmt: skip


@pytest.mark.parametrize(
    "phase",
    [Phase.PENDING, Phase.LOADING, Phase.VERIFYING, Phase.SHADOWING, Phase.SHIFTING, Phase.WITHDRAWING,
     Phase.RESTARTING, Phase.BAKING],
)  # fmt: skip
def test_an_open_one_is_held_and_the_live_release_has_all_traffic(phase: Phase) -> None:
    then = restored(rollout(phase), 9.0, "restored", by="ada")
    assert (then.phase, then.hold, then.weight_percent, then.live) == (Phase.PENDING, Hold.PAUSED, 0.0, OLD)
    assert (then.route.stable, then.route.candidate) == (OLD, None)
    assert advance(then, GONE, 10.0) == then  # whatever is missing, it waits for a person


def test_a_resumed_one_loads_and_returns_to_its_step() -> None:
    held = restored(rollout(Phase.SHIFTING, step=2), 9.0, "restored", by="ada")
    now = advance(replace(held, hold=None), GONE, 10.0)
    assert now.phase is Phase.LOADING
    now = advance(advance(now, Seen(), 11.0), Seen(verified=True), 12.0)
    assert (now.phase, now.step, now.evidence) == (Phase.SHIFTING, 2, {})
    assert now.epoch > 7
    assert now.evidence_epoch == now.epoch


@pytest.mark.parametrize(
    ("phase", "end", "live"),
    [
        (Phase.DRAINING, Phase.PROMOTED, NEW),
        (Phase.ABORTING, Phase.ROLLED_BACK, OLD),
        (Phase.RETIRING, Phase.RETIRED, None),
    ],
)
def test_one_that_had_decided_is_completed(phase: Phase, end: Phase, live: Release | None) -> None:
    before = rollout(phase)
    if phase is Phase.RETIRING:
        before = Rollout(
            id="r", candidate=OLD, stable=None, previous=None, plan=Plan(), phase=phase, began=1.0, since=2.0,
            evidence_from=2.0,
        )  # fmt: skip
    then = restored(before, 9.0, "restored", by="ada")
    assert (then.phase, then.live, then.hold) == (end, live, None)


@pytest.mark.parametrize("phase", [Phase.PROMOTED, Phase.ROLLED_BACK, Phase.RETIRED])
def test_one_that_had_ended_stays(phase: Phase) -> None:
    assert restored(rollout(phase), 9.0, "restored", by="ada") == rollout(phase)


WEIGHS = 7000  # bytes of evidence: as a rollout under traffic has


class GrowingJudge(FakeJudge):
    """Each look at the log is more evidence, and never enough."""

    def judge(self, rollout: Rollout, t: float) -> Judgement:
        found = super().judge(rollout, t)
        return replace(found, evidence=dict(found.evidence) | {"padding": "x" * WEIGHS})


def test_a_rollout_that_is_held_does_not_fill_the_disk_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hours in ticks of ten seconds; a line of the journal for each of them would be 5.5 MB."""
    verdict = Verdict.INCONCLUSIVE
    monkeypatch.setattr(os, "fsync", lambda _: None)
    scene = Scene(tmp_path, judge=GrowingJudge(), compact_at=150)
    scene.promote_first()
    command = scene.command("start", 2)
    scene.judge.verdicts[5.0] = verdict
    held = scene.until_true(lambda now: now.hold is Hold(verdict.value))
    read, sizes = home_rollouts(tmp_path).reader("flights", held.id), []
    journal = tmp_path / "rollouts" / "flights" / "decisions"
    for hour in range(2):
        for _ in range(360):
            scene.clock.t += 9.5
            scene.tick()
        sizes.append(sum(file.stat().st_size for file in journal.iterdir()))
        assert read() == history(tmp_path, "flights", held.id), f"hour {hour}"
    assert max(sizes) < 2.5e6, sizes
    before = scene.controller.rollouts()[0]
    scene.kill()
    recorded = decision2rollout(history(tmp_path, "flights")[-1])
    assert recorded == scene.controller.rollouts()[0]
    assert (recorded.hold, recorded.epoch, recorded.since) == (before.hold, before.epoch, before.since)
    assert before.evidence["looks"] - recorded.evidence["looks"] < 10, "no more than since the last line"
    now = model_status(tmp_path, "flights")
    assert now
    assert (now.live, now.rollout.hold) == (1, verdict.value)
    story = [decision.phase for decision in tell(history(tmp_path, "flights", held.id)).decisions]
    assert story[:4] == ["pending", "loading", "verifying", "shifting"]
    assert "flights-v2 against flights-v1" in story2html(tell(history(tmp_path, "flights", held.id)))
    assert [found.command for found in history(tmp_path, "flights")].count(command) == 1
    scene.judge.verdicts.clear()
    scene.command("resume")
    scene.until(Phase.PROMOTED)
    scene.kill()


def line(seq: int, **changes: Any) -> Decision:
    state = {"hold": changes.pop("hold", None), "epoch": changes.pop("epoch", 3), "plan": {"step_s": 5}}
    fields: dict[str, Any] = {
        "seq": seq, "t": 10.0 * seq, "rollout": "r1", "phase": "shifting", "step": 0, "weight": 5.0,
        "verdict": "wait", "reason": "", "by": "controller", "state": state,
    }  # fmt: skip
    return Decision(**(fields | changes))


def test_turns_and_commands_stay_and_evidence_between_them_is_thinned_over_time() -> None:
    turns = {500: {"phase": "baking"}, 700: {"command": "c1"}, 900: {"epoch": 4}}
    rows, now = [], {}
    for seq in range(1, 5001):
        now = {"epoch": now.get("epoch", 3), "phase": now.get("phase", "shifting")} | turns.get(seq, {})
        rows.append(line(seq, **now))
    kept = worth_keeping(rows)
    assert {1, 500, 700, 900, 5000} <= kept
    assert len(kept) < 220
    gaps = [b - a for a, b in zip(sorted(kept), sorted(kept)[1:], strict=False)]
    assert max(gaps) < 60, "there is evidence of every time"
    again = worth_keeping([row for row in rows if row.seq in kept])
    assert {1, 500, 700, 900, 5000} <= again
    assert len(again) > 150, "what is thinned again and again stays"


def test_holds_that_come_and_go_are_bounded_too() -> None:
    rows = [line(seq, hold="no_traffic" if seq % 2 else None) for seq in range(1, 20_000)]
    assert len(worth_keeping(rows)) < 510


def test_an_earlier_rollout_keeps_its_course_and_some_of_its_evidence() -> None:
    rows = [line(seq, rollout="r1") for seq in range(1, 400)]
    rows += [line(seq, rollout="r2") for seq in range(400, 500)]
    kept = worth_keeping(rows)
    assert {1, 399, 400, 499} <= kept
    assert len([seq for seq in kept if seq < 400]) < 25
    assert len([seq for seq in kept if seq >= 400]) == 100
