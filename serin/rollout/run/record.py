"""Converts a rollout's state to and from a line of its journal, and locates the journals."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from serin.errors import FileBroken, NameInvalid
from serin.formats.serving.journal import Decision, Journal, last_decision, torn_bytes, torn_file
from serin.machine.documents import UNFIT
from serin.machine.in_memory import JOURNALS, memory_folder
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase, Rollout
from serin.rollout.decide.verdict import Verdict
from serin.spec.names import is_model_name
from serin.store.artifacts import Release

_APPENDED_S: Final = 0.05


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
    """One journal per model: `<home>/rollouts/<model>/journal.jsonl`. Folders that no model can be named after are left
    alone."""

    def __init__(self, home: Path) -> None:
        self._home, self._folder = home, home / "rollouts"

    def models(self) -> list[str]:
        found = (file.parent.name for file in self._folder.glob("*/journal.jsonl"))
        return sorted(name for name in found if is_model_name(name))

    def path(self, model: str) -> Path:
        return self._folder / model / "journal.jsonl"

    def spare(self, model: str) -> Path | None:
        """Where decisions are kept that the disk does not take; None where no stack was started."""
        memory = memory_folder(self._home)
        return None if memory is None else memory / JOURNALS / f"{model}.jsonl"

    def open(self, model: str) -> Journal:
        journal = Journal(self.path(model), spare=self.spare(model))
        try:
            self.checked(model, journal.last())
        except BaseException:
            journal.close()
            raise
        return journal

    def last(self, model: str) -> Decision | None:
        """Returns the newest decision. Raises FileBroken when it says nothing about a rollout of this model."""
        return self.checked(model, last_decision(self.path(model), self.spare(model)))

    def checked(self, model: str, newest: Decision | None) -> Decision | None:
        try:
            of = decision2rollout(newest).model if newest else model
            if of != model:
                raise ValueError(f"its newest decision is about {of}")
        except (*UNFIT, NameInvalid) as error:
            problem = f"{type(error).__name__}: {error}"
            raise FileBroken(path=self.path(model), problem=problem, advice=lost_advice(model)) from error
        return newest


def lost_advice(model: str) -> str:
    return (
        f"restore it from a backup, or move it away and run `serin rollout start {model} VERSION` with the version "
        "that is to be live"
    )


def torn_journals(home: Path) -> dict[str, str]:
    """Returns by model what is said about a journal whose end nobody can read."""
    journals, found = JournalFolder(home), {}
    for model in journals.models():
        path = journals.path(model)
        if torn_bytes(path):
            time.sleep(_APPENDED_S)  # a line that is being written is complete by then
        if lost := torn_bytes(path):
            where = torn if (torn := torn_file(path)).exists() else path
            found[model] = (
                f"{where} has {lost} bytes that are not a decision: the state shown may be older than the last one; "
                f"check which version should be live (`serin models show {model}`), then remove {torn} or those bytes"
            )
    return found
