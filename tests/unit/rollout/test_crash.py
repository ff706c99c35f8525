"""A controller is killed at every effect in turn, before it and after it; the next one must end where it would have."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from serin.rollout.decide.plan import Plan, ShadowPlan
from serin.rollout.decide.state import Phase
from serin.rollout.decide.verdict import Verdict
from serin.rollout.run.status import history
from tests.fakes.rollout import Bomb, Crash
from tests.unit.rollout.conftest import PLAN, Scene, release


def nothing(_: Scene) -> None: ...


def one_live(scene: Scene) -> None:
    scene.promote_first()


def one_live_and_a_bad_candidate(scene: Scene) -> None:
    scene.promote_first()
    scene.judge.verdicts[50.0] = Verdict.FAIL


def one_live_and_a_wrong_candidate(scene: Scene) -> None:
    scene.promote_first()
    scene.fleet.wrong.add("flights-v2")


def two_were_live(scene: Scene) -> None:
    scene.promote_first()
    scene.command("start", 2)
    scene.until(Phase.PROMOTED)
    scene.tick(3)


def one_live_and_a_candidate_that_is_slow_by_chance(scene: Scene) -> None:
    scene.promote_first()
    scene.judge.slow_by_chance = True


def one_live_and_a_candidate_that_serves_something_else(scene: Scene) -> None:
    scene.promote_first()
    scene.replayer.wrong_at = 2


@dataclass(frozen=True)
class Story:
    before: Callable[[Scene], None]
    command: tuple[Any, ...]
    end: Phase
    plan: Plan = PLAN
    effects: frozenset[str] = frozenset(("append", "apply", "start", "verify", "set_alias", "answer"))


STORIES = {
    "the first release": Story(nothing, ("start", 1), Phase.PROMOTED),
    "a promotion": Story(one_live, ("start", 2), Phase.PROMOTED),
    "a rollback": Story(one_live_and_a_bad_candidate, ("start", 2), Phase.ROLLED_BACK),
    "a candidate that answers wrongly": Story(
        one_live_and_a_wrong_candidate, ("start", 2), Phase.ROLLED_BACK
    ),
    "a second opinion": Story(
        one_live_and_a_candidate_that_is_slow_by_chance,
        ("start", 2),
        Phase.PROMOTED,
        replace(PLAN, steps=(50.0, 100.0), second_opinion=True),
    ),
    "recorded requests first": Story(
        one_live,
        ("start", 2),
        Phase.PROMOTED,
        replace(PLAN, steps=(50.0, 100.0), shadow=ShadowPlan(rows=300, time_s=0.0)),
    ),
    "recorded requests answered wrongly": Story(
        one_live_and_a_candidate_that_serves_something_else,
        ("start", 2),
        Phase.ROLLED_BACK,
        replace(PLAN, shadow=ShadowPlan(rows=300, time_s=0.0)),
    ),
    "back to the version before": Story(two_were_live, ("rollback",), Phase.PROMOTED),
    "a retirement": Story(
        two_were_live,
        ("retire",),
        Phase.RETIRED,
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
    monkeypatch.setattr(
        os, "fsync", lambda _: None
    )  # a killed process loses nothing it wrote; half of the time is this
    (tmp_path / "before").mkdir()
    before = Scene(tmp_path / "before")
    story.before(before)
    before.kill()
    calm = copied(before, tmp_path / "calm", Bomb())
    expected, effects = run(calm, story), calm.bomb.log
    assert story.effects <= set(effects)

    for at, effect in enumerate(effects, start=1):
        for after in (False, True):
            scene = copied(before, tmp_path / f"{at}-{after}", Bomb(at=at, after=after))
            assert run(scene, story) == expected, f"crash {'after' if after else 'before'} {effect} ({at})"


def test_a_torn_journal_line_is_a_decision_that_was_not_made(scene: Scene) -> None:
    scene.promote_first()
    scene.command("start", 2)
    scene.until_true(lambda now: now.weight_percent == 5)
    scene.kill()
    journal = scene.home / "rollouts" / "flights" / "journal.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"t":1000009.0,"rollout":"x","phase":"shifting","step":1,"weight":50.0,"verd')
    scene.tick()
    assert scene.router.shares("flights")[-1] == ("flights-v2", 5)
    scene.until(Phase.PROMOTED)


def test_a_candidate_that_died_with_its_controller_is_rolled_back_by_the_next(scene: Scene) -> None:
    scene.promote_first()
    scene.command("start", 2)
    scene.until(Phase.SHIFTING)
    scene.kill()
    scene.fleet.stop(release(2))
    scene.tick()
    now = scene.controller.rollouts()[0]
    assert (now.phase, now.reason) == (Phase.ABORTING, "flights-v2 is not running")
    assert scene.router.shares("flights")[-1] == ("flights-v1", 100)
