from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serin.formats.serving.journal import Decision
from serin.reports.rollout_page import story2html
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.decide.verdict import Judgement, Verdict
from serin.rollout.run.compaction import worth_keeping
from serin.rollout.run.record import decision2rollout
from serin.rollout.run.status import history, model_status, reader
from serin.rollout.run.story import tell
from tests.fakes.rollout import FakeJudge
from tests.unit.rollout.conftest import Scene

WEIGHS = 7000  # bytes of evidence: as a rollout under traffic has


class GrowingJudge(FakeJudge):
    """Each look at the log is more evidence, and never enough."""

    def judge(self, rollout: Rollout, t: float) -> Judgement:
        found = super().judge(rollout, t)
        return replace(found, evidence=dict(found.evidence) | {"padding": "x" * WEIGHS})


def test_a_rollout_that_is_held_does_not_fill_the_disk_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four hours in ticks of ten seconds; a line of the journal for each of them would be 11 MB."""
    verdict = Verdict.INCONCLUSIVE
    monkeypatch.setattr(os, "fsync", lambda _: None)
    scene = Scene(tmp_path, judge=GrowingJudge(), compact_bytes=1 << 20)
    scene.promote_first()
    command = scene.command("start", 2)
    scene.judge.verdicts[5.0] = verdict
    held = scene.until_true(lambda now: now.hold is Hold(verdict.value))
    follow, sizes = reader(tmp_path, "flights", held.id), []
    journal = tmp_path / "rollouts" / "flights" / "journal.jsonl"
    for hour in range(4):
        for _ in range(360):
            scene.clock.t += 9.5
            scene.tick()
        sizes.append(journal.stat().st_size)
        assert follow.decisions() == history(tmp_path, "flights", held.id), f"hour {hour}"
    assert max(sizes) < 5e6
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
