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
        self.objects, self.leadership, self.term = objects, leadership, term
        self.cache = cache or DecisionCache(objects)
        self.compact_at, self.young_s = compact_at, young_s

    def models(self) -> list[str]:
        return journaled_models(self.objects)

    def open(self, model: str) -> StoreJournal:
        if valid_model_name(model) not in self.models():
            self.leadership.check(self.term)
            add_model(self.objects, model)
        return StoreJournal(self, model)


class StoreJournal:
    """A journal open for writing."""

    def __init__(self, journals: StoreJournals, model: str) -> None:
        self._journals, self._model = journals, model
        self._compact_at = journals.compact_at
        decisions = journals.cache.all(model)
        self._count = len(decisions)
        newest = decisions[-1].seq if decisions else 0
        self._writer = NumberedWriter(journals.objects, prefix_of(model), newest)

    waiting = 0  # hosts follow the store alone: there is nothing to act on before a decision is there

    def flush(self) -> None:
        """Nothing waits."""

    def append(self, decision: Decision, *, urgent: bool = False) -> Decision:
        """Returns the decision with its number, once its object exists."""
        del urgent
        leadership, term = self._journals.leadership, self._journals.term
        writer = Writer(holder=leadership.holder, term=term)
        leadership.check(term)
        try:
            seq = self._writer.append(lambda seq: dump_decision(replace(decision, seq=seq), writer))
        except ObjectExists as error:
            leadership.lose(term)
            raise LeadershipLost(leader=f"{error.key} is not this one's") from error
        numbered = replace(decision, seq=seq)
        self._journals.cache.put(self._model, numbered)
        self._count += 1
        return numbered

    def all(self) -> list[Decision]:
        return self._journals.cache.all(self._model)

    def compact(self, keep: Keep) -> bool:
        """Removes the decisions not in `keep`, if there are many and they have doubled since; True when it did."""
        if self._count < self._compact_at:
            return False
        self._compact_at = 2 * self._count  # also when it fails: not again with each decision
        decisions, journals = self.all(), self._journals
        journals.leadership.check(journals.term)
        removed = _removable(decisions, {*keep(decisions), self._writer.seq}, journals.young_s)
        for seq in removed:
            journals.objects.remove(numbered_key(prefix_of(self._model), seq))
        self._count = len(decisions) - len(removed)
        self._compact_at = max(journals.compact_at, 2 * self._count)
        return True

    def close(self) -> None:
        """Nothing is held: the leader's record is the lock."""


def _removable(known: Sequence[Decision], kept: set[int], young_s: float) -> list[int]:
    newest = known[-1].t
    return [each.seq for each in known if each.seq not in kept and newest - each.t >= young_s]
