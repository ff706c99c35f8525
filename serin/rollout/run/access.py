"""How people and flows reach rollouts: read the journals, and send commands to the controller that decides.

On one machine both are in its home; where several hosts share a store, both are in the store. `find_rollouts` decides
which of them it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from serin.errors import StoreNotConditional
from serin.formats.cluster.leader import KEY
from serin.formats.serving.journal import Decision, DecisionCache, journaled_models
from serin.machine import environment
from serin.machine.process import stack_decides
from serin.rollout.run.commands import Mailbox
from serin.rollout.run.record import check_newest
from serin.spec.names import valid_model_name
from serin.store.home_objects import HomeObjects
from serin.store.objects import Objects, is_bucket
from serin.store.open import open_objects


class Rollouts:
    """The rollouts whose journals these objects hold. `log`: the request log of the only gateway; None: each host has
    its own."""

    def __init__(self, objects: Objects, log: Path | None = None) -> None:
        self.objects, self.mailbox, self.log = objects, Mailbox(objects), log
        self._cache = DecisionCache(objects)

    def models(self) -> list[str]:
        """Returns every model that ever had a rollout, sorted."""
        return journaled_models(self.objects)

    def last(self, model: str) -> Decision | None:
        """Returns the newest decision. Raises FileBroken when it says nothing about a rollout of this model."""
        return check_newest(model, self._cache.last(valid_model_name(model)), self.objects.url)

    def decisions(self, model: str, rollout: str | None = None) -> list[Decision]:
        """Returns every decision about a model, oldest first, or those of one rollout."""
        if rollout is None:
            return self._cache.all(valid_model_name(model))
        return self._cache.of_rollout(valid_model_name(model), rollout)

    def reader(self, model: str, rollout: str) -> Callable[[], list[Decision]]:
        """Returns what reads one rollout's decisions, oldest first: at each call only what is new is read. What
        compaction has removed is left out."""
        return partial(self._cache.of_rollout, valid_model_name(model), rollout)


def home_rollouts(home: Path) -> Rollouts:
    """Returns the rollouts of one machine's stack."""
    return Rollouts(HomeObjects(home), home / "gateway" / "requests.jsonl")


def find_rollouts(home: Path | None = None) -> Rollouts:
    """Returns the rollouts of `home` (None: the environment's) if its stack is up or the store has no cluster, else
    those of the cluster. Raises StoreUnreachable."""
    home = environment.home() if home is None else home
    objects = find_cluster(home)
    return home_rollouts(home) if objects is None else Rollouts(objects)


def rollouts_at(url: str) -> Rollouts | None:
    """Returns the rollouts of those who serve from the store at `url`: a stack on this machine, or the hosts that share
    it. None: this machine sees neither."""
    own = _place(url) == _place(environment.store_url())
    home = environment.home() if own else _place(url).parent  # the home of a store that nobody moved
    if stack_decides(home):
        return home_rollouts(home)
    objects = open_objects(url)
    return None if objects.read(KEY) is None else Rollouts(objects)


def _place(url: str) -> Path:
    if is_bucket(url):
        return Path("/", url)  # of no home
    return Path(url.removeprefix("file://")).expanduser().resolve()


def find_cluster(home: Path) -> Objects | None:
    """Returns the store in which controllers of several hosts meet; None: this machine's stack decides itself."""
    if stack_decides(home):
        return None
    try:
        objects = open_objects(environment.store_url())
    except StoreNotConditional:
        return None
    return None if objects.read(KEY) is None else objects  # a controller has led here
