"""What follows a rollout hears of every decision once."""

from __future__ import annotations

from pathlib import Path

import pytest

from serin.formats.serving.journal import Decision, Journal
from serin.pipeline import roll_out
from serin.pipeline.roll_out import follow_decisions
from serin.rollout.run.record import JournalFolder


def decision(phase: str) -> Decision:
    return Decision(
        t=1.0, rollout="r", phase=phase, step=None, weight=0.0, verdict=None, reason="x" * 200, by="test"
    )


def test_a_decision_after_a_compaction_is_neither_missed_nor_repeated(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_out, "_POLL_S", 0.01)
    path, heard, looks = JournalFolder(home).path("flights"), [], []
    with Journal(path, compact_bytes=1) as journal:
        for phase in ("pending", "loading", "verifying", "shifting"):
            journal.append(decision(phase))

        def until(decisions: list[Decision]) -> bool:
            looks.append(len(decisions))
            if len(looks) == 1:
                assert journal.compact(lambda _: {1})
                journal.append(decision("aborting"))
                journal.append(decision("rolled_back"))
            return len(looks) == 2

        follow_decisions("flights", "r", lambda found: heard.append(found.phase), until=until)
    assert looks == [4, 4], "as many lines as before, but others"
    assert heard == ["pending", "loading", "verifying", "shifting", "aborting", "rolled_back"]
