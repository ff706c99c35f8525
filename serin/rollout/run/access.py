"""How people and flows reach rollouts: read the journals, and send commands to the controller that decides.

On one machine both are in its home; where several hosts share a store, both are in the store. `find_rollouts` decides
which of them it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from serin.errors import StoreNotConditional
from serin.formats.cluster.decisions import DecisionCache, journaled_models
from serin.formats.cluster.leader import KEY
from serin.formats.serving.journal import Decision, JournalReader, read_decisions
from serin.machine import environment
from serin.machine.process import stack_decides
from serin.rollout.run.commands import HomeMailbox, Mailbox
from serin.rollout.run.mailbox import StoreMailbox
from serin.rollout.run.record import JournalFolder
from serin.spec.names import valid_model_name
from serin.store.objects import Objects
from serin.store.open import open_objects


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


def has_cluster(objects: Objects) -> bool:
    """Returns whether a controller has ever led here. Raises StoreUnreachable."""
    return objects.read(KEY) is not None


class StoreRollouts:
    def __init__(self, objects: Objects) -> None:
        self.mailbox: Mailbox = StoreMailbox(objects)
        self.log: Path | None = None
        self._objects, self._cache = objects, DecisionCache(objects)

    def models(self) -> list[str]:
        return journaled_models(self._objects)

    def last(self, model: str) -> Decision | None:
        return self._cache.last(valid_model_name(model))

    def decisions(self, model: str, rollout: str | None = None) -> list[Decision]:
        if rollout is None:
            return self._cache.all(valid_model_name(model))
        return self._cache.of_rollout(valid_model_name(model), rollout)

    def reader(self, model: str, rollout: str) -> StoreReader:
        return StoreReader(cache=self._cache, model=valid_model_name(model), rollout=rollout)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReader:
    """Follows one rollout. What compaction has removed is left out."""

    cache: DecisionCache
    model: str
    rollout: str

    def decisions(self) -> list[Decision]:
        return self.cache.of_rollout(self.model, self.rollout)


def find_rollouts(home: Path | None = None) -> Rollouts:
    """Returns the rollouts of `home` (None: the environment's) if its stack is up or the store has no cluster, else
    those of the cluster. Raises StoreUnreachable."""
    home = environment.home() if home is None else home
    objects = find_cluster(home)
    return HomeRollouts(home) if objects is None else StoreRollouts(objects)


def find_cluster(home: Path) -> Objects | None:
    """Returns the store in which controllers of several hosts meet; None: this machine's stack decides itself."""
    if stack_decides(home):
        return None
    try:
        objects = open_objects(environment.store_url())
    except StoreNotConditional:
        return None
    return objects if has_cluster(objects) else None
