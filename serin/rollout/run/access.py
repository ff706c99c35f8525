"""How people and flows reach rollouts: read the journals, and send commands to the controller that decides.

On one machine both are in its home; where several hosts share a store, both are in the store (rollout/cluster). Which
of them it is, is decided once, in pipeline/rollouts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from serin.formats.serving.journal import Decision, JournalReader, read_decisions
from serin.rollout.run.commands import HomeMailbox, Mailbox
from serin.rollout.run.record import JournalFolder
from serin.spec.names import valid_model_name


class Reader(Protocol):
    """One rollout's decisions, asked for again and again: each time only what is new is read."""

    def decisions(self) -> list[Decision]:
        """Returns all of them, oldest first."""
        ...


class Rollouts(Protocol):
    @property
    def mailbox(self) -> Mailbox: ...

    @property
    def log(self) -> Path | None:
        """The request log of the only gateway; None: there are several."""
        ...

    def models(self) -> Sequence[str]:
        """Returns every model that ever had a rollout, sorted."""
        ...

    def last(self, model: str) -> Decision | None: ...

    def decisions(self, model: str, rollout: str | None = None) -> list[Decision]:
        """Returns every decision about a model, oldest first, or those of one rollout."""
        ...

    def reader(self, model: str, rollout: str) -> Reader: ...


class HomeRollouts:
    """The rollouts of one machine's stack."""

    def __init__(self, home: Path) -> None:
        self.mailbox: Mailbox = HomeMailbox(home)
        self.log: Path | None = home / "gateway" / "requests.jsonl"
        self._journals = JournalFolder(home)

    def models(self) -> list[str]:
        return self._journals.models()

    def last(self, model: str) -> Decision | None:
        return self._journals.last(valid_model_name(model))

    def decisions(self, model: str, rollout: str | None = None) -> list[Decision]:
        decisions = read_decisions(self._path(model), self._journals.spare(model))
        return [decision for decision in decisions if rollout is None or decision.rollout == rollout]

    def reader(self, model: str, rollout: str) -> JournalReader:
        return JournalReader(self._path(model), rollout, self._journals.spare(model))

    def _path(self, model: str) -> Path:
        return self._journals.path(valid_model_name(model))
