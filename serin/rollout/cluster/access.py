"""The rollouts of several hosts, as people and flows reach them: through the store that the hosts share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from serin.formats.cluster.decisions import DecisionCache, journaled_models
from serin.formats.cluster.leader import KEY
from serin.formats.serving.journal import Decision
from serin.rollout.cluster.mailbox import StoreMailbox
from serin.rollout.run.commands import Mailbox
from serin.spec.names import valid_model_name
from serin.store.objects import Objects


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
