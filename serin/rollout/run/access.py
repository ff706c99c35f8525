"""How people and flows reach rollouts: read the journals, and send commands to the controller that decides.

On one machine both are in its home; where several hosts share a store, both are in the store. `find_rollouts` decides
which of them it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from serin.errors import StoreNotConditional
from serin.formats.cluster.decisions import DecisionCache, journaled_models
from serin.formats.cluster.leader import KEY
from serin.formats.serving.journal import Decision, JournalReader, read_decisions
from serin.machine import environment
from serin.machine.process import stack_decides
from serin.rollout.run.commands import Mailbox
from serin.rollout.run.record import JournalFolder
from serin.spec.names import valid_model_name
from serin.store.objects import Objects
from serin.store.open import open_objects


class HomeRollouts:
    """The rollouts of one machine's stack. `log`: the request log of its gateway."""

    def __init__(self, home: Path) -> None:
        self.mailbox = Mailbox(home)
        self.log: Path | None = home / "gateway" / "requests.jsonl"
        self._journals = JournalFolder(home)

    def models(self) -> list[str]:
        """Returns every model that ever had a rollout, sorted."""
        return self._journals.models()

    def last(self, model: str) -> Decision | None:
        return self._journals.last(valid_model_name(model))

    def decisions(self, model: str, rollout: str | None = None) -> list[Decision]:
        """Returns every decision about a model, oldest first, or those of one rollout."""
        decisions = read_decisions(self._path(model), self._journals.spare(model))
        return [decision for decision in decisions if rollout is None or decision.rollout == rollout]

    def reader(self, model: str, rollout: str) -> Callable[[], list[Decision]]:
        """Returns what reads one rollout's decisions, oldest first: at each call only what is new is read."""
        return JournalReader(self._path(model), rollout, self._journals.spare(model)).decisions

    def _path(self, model: str) -> Path:
        return self._journals.path(valid_model_name(model))


class StoreRollouts:
    """The same of several hosts that share a store. There is no `log`: each host has its own."""

    def __init__(self, objects: Objects) -> None:
        self.mailbox = Mailbox(objects)
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

    def reader(self, model: str, rollout: str) -> Callable[[], list[Decision]]:
        """Leaves out what compaction has removed."""
        return partial(self._cache.of_rollout, valid_model_name(model), rollout)


Rollouts = HomeRollouts | StoreRollouts


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
    return None if objects.read(KEY) is None else objects  # a controller has led here
