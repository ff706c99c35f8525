"""The journals of a leading controller: each decision is an object that nobody else can write any more.

A lost race means that another controller leads: LeadershipLost, and nothing of this one's state is right any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from serin.errors import LeadershipLost, ObjectExists
from serin.formats.cluster.decisions import (
    DecisionCache,
    Writer,
    add_model,
    dump_decision,
    journaled_models,
    prefix_of,
)
from serin.formats.serving.journal import Decision, Keep
from serin.rollout.run.leadership import Leadership
from serin.spec.names import valid_model_name
from serin.store.numbered import NumberedWriter, numbered_key
from serin.store.objects import Objects

_COMPACT: Final = 600  # decisions; a rollout that is held adds one in ten seconds
_YOUNG_S: Final = 3600.0  # a number is not free again before that: no process may still want to write it


class StoreJournals:
    """One journal per model in the store, written in one term of a leadership."""

    def __init__(
        self,
        objects: Objects,
        leadership: Leadership,
        term: int,
        *,
        cache: DecisionCache | None = None,
        compact_at: int = _COMPACT,
        young_s: float = _YOUNG_S,
    ) -> None:
        self._objects, self._leadership, self._term = objects, leadership, term
        self._cache = cache or DecisionCache(objects)
        self._compact_at, self._young_s = compact_at, young_s

    def models(self) -> list[str]:
        return journaled_models(self._objects)

    def open(self, model: str) -> StoreJournal:
        if valid_model_name(model) not in self.models():
            self._leadership.check(self._term)
            add_model(self._objects, model)
        return StoreJournal(
            self._objects,
            model,
            self._leadership,
            self._term,
            cache=self._cache,
            compact_at=self._compact_at,
            young_s=self._young_s,
        )


class StoreJournal:
    """A journal open for writing."""

    def __init__(
        self,
        objects: Objects,
        model: str,
        leadership: Leadership,
        term: int,
        *,
        cache: DecisionCache,
        compact_at: int,
        young_s: float,
    ) -> None:
        self._objects, self._model, self._cache = objects, model, cache
        self._leadership, self._term = leadership, term
        self._compact_least = self._compact_at = compact_at
        self._young_s = young_s
        known = cache.all(model)
        self._count = len(known)
        self._writer = NumberedWriter(objects, prefix_of(model), known[-1].seq if known else 0)

    waiting = 0  # hosts follow the store alone: there is nothing to act on before a decision is there

    def flush(self) -> None:
        """Nothing waits."""

    def append(self, decision: Decision, *, urgent: bool = False) -> Decision:
        """Returns the decision with its number, once its object exists."""
        del urgent
        writer = Writer(holder=self._leadership.holder, term=self._term)
        self._leadership.check(self._term)
        try:
            seq = self._writer.append(lambda seq: dump_decision(replace(decision, seq=seq), writer))
        except ObjectExists as error:
            self._leadership.lose(self._term)
            raise LeadershipLost(leader=f"{error.key} is not this one's") from error
        numbered = replace(decision, seq=seq)
        self._cache.put(self._model, numbered)
        self._count += 1
        return numbered

    def all(self) -> list[Decision]:
        return self._cache.all(self._model)

    def compact(self, keep: Keep) -> bool:
        """Removes the decisions not in `keep`, if there are many and they have doubled since; True when it did."""
        if self._count < self._compact_at:
            return False
        self._compact_at = 2 * self._count  # also when it fails: not again with each decision
        known = self.all()
        self._leadership.check(self._term)
        removed = _removable(known, {*keep(known), self._writer.seq}, self._young_s)
        for seq in removed:
            self._objects.remove(numbered_key(prefix_of(self._model), seq))
        self._count = len(known) - len(removed)
        self._compact_at = max(self._compact_least, 2 * self._count)
        return True

    def close(self) -> None:
        """Nothing is held: the leader's record is the lock."""


def _removable(known: Sequence[Decision], kept: set[int], young_s: float) -> list[int]:
    newest = known[-1].t
    return [each.seq for each in known if each.seq not in kept and newest - each.t >= young_s]
