"""Converts a rollout's state to and from a line of its journal, and locates the journals."""

from __future__ import annotations

from pathlib import Path

from serin.formats.serving.journal import Decision, Journal
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.decide.verdict import Verdict
from serin.store.artifacts import Release


def rollout2decision(rollout: Rollout, t: float, *, command: str | None = None) -> Decision:
    return Decision(
        t=t,
        rollout=rollout.id,
        phase=rollout.phase.value,
        step=rollout.step,
        weight=rollout.weight_percent,
        verdict=rollout.verdict.value if rollout.verdict else None,
        reason=rollout.reason,
        by=rollout.by,
        evidence=dict(rollout.evidence),
        command=command,
        state={
            "candidate": rollout.candidate.name,
            "stable": rollout.stable.name if rollout.stable else None,
            "previous": rollout.previous.name if rollout.previous else None,
            "hold": rollout.hold.value if rollout.hold else None,
            "approved": rollout.approved,
            "epoch": rollout.epoch,
            "began": rollout.began,
            "since": rollout.since,
            "evidence_from": rollout.evidence_from,
            "evidence_epoch": rollout.evidence_epoch,
            "restarted": rollout.restarted,
            "plan": rollout.plan.to_json(),
        },
    )


def decision2rollout(decision: Decision) -> Rollout:
    state = decision.state
    return Rollout(
        id=decision.rollout,
        candidate=Release.parse(state["candidate"]),
        stable=Release.parse(state["stable"]) if state["stable"] else None,
        previous=Release.parse(state["previous"]) if state["previous"] else None,
        plan=Plan.from_json(state["plan"]),
        phase=Phase(decision.phase),
        step=decision.step,
        hold=Hold(state["hold"]) if state["hold"] else None,
        approved=state.get("approved"),
        epoch=state["epoch"],
        began=state["began"],
        since=state["since"],
        evidence_from=state["evidence_from"],
        evidence_epoch=state.get("evidence_epoch", state["epoch"]),
        restarted=state.get("restarted", False),
        verdict=Verdict(decision.verdict) if decision.verdict else None,
        reason=decision.reason,
        by=decision.by,
        evidence=decision.evidence,
    )


class JournalFolder:
    """One journal per model: `<home>/rollouts/<model>/journal.jsonl`."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "rollouts"

    def models(self) -> list[str]:
        return sorted(file.parent.name for file in self._folder.glob("*/journal.jsonl"))

    def path(self, model: str) -> Path:
        return self._folder / model / "journal.jsonl"

    def open(self, model: str) -> Journal:
        return Journal(self.path(model))
