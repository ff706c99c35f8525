"""Converts a rollout's state to and from a line of its journal, and locates the journals."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from serin.errors import FileBroken, NameInvalid
from serin.formats.serving.journal import Decision, Journal, last_decision, torn_bytes, torn_file
from serin.machine.documents import UNFIT
from serin.machine.in_memory import JOURNALS, memory_folder
from serin.machine.typed_json import json2value, value2json
from serin.rollout.decide.state import Rollout
from serin.spec.names import is_model_name

_APPENDED_S: Final = 0.05
_OF_DECISION: Final = ("phase", "step", "verdict", "reason", "by", "evidence")  # the others are its state


def rollout2decision(rollout: Rollout, t: float, *, command: str | None = None) -> Decision:
    state = value2json(replace(rollout, evidence={}))
    known = {name: state.pop(name) for name in _OF_DECISION}
    return Decision(
        **{**known, "evidence": dict(rollout.evidence)},
        t=t,
        rollout=state.pop("id"),
        weight=rollout.weight_percent,
        command=command,
        state=state,
    )


def decision2rollout(decision: Decision) -> Rollout:
    known = {name: getattr(decision, name) for name in _OF_DECISION}
    return json2value(Rollout, {**decision.state, **known, "id": decision.rollout})


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
        f"restore it from a backup, or move it away and run `serin rollout start {model}:VERSION` with the version "
        "that is to be live"
    )


def torn_journals(home: Path, models: Iterable[str]) -> dict[str, str]:
    """Returns by model what is said about a journal whose end nobody can read."""
    journals, found = JournalFolder(home), {}
    for model in models:
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
