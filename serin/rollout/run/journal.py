"""The journals of a leading controller: each decision is an object that nobody else can write any more.

A lost race means that another controller leads: LeadershipLost, and nothing of this one's state is right any more.

On one machine an urgent decision does not wait for a disk that takes no more: it is kept in memory and counts from then
on, and is written as soon as the disk takes it. Several hosts follow the store alone: there is nothing to act on before
a decision is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from serin.errors import LeadershipLost, ObjectExists
from serin.formats.serving.journal import (
    Decision,
    DecisionCache,
    Keep,
    Writer,
    add_model,
    dump_decision,
    journaled_models,
    prefix_of,
)
from serin.rollout.run.leadership import Leads
from serin.rollout.run.record import check_newest
from serin.spec.names import valid_model_name
from serin.store.home_objects import HomeObjects
from serin.store.numbered import NumberedWriter, numbered_key, numbers
from serin.store.objects import Objects

_COMPACT: Final = 600  # decisions; a rollout that is held adds one in ten seconds
_YOUNG_S: Final = 3600.0  # a number is not free again before that: no process may still want to write it


class StoreJournals:
    """One journal per model in the store, written in one term of a leadership."""

    def __init__(
        self,
        objects: Objects,
        leadership: Leads,
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
        check_newest(model, decisions[-1] if decisions else None, journals.objects.url)
        self._count = len(decisions)
        objects = journals.objects
        self._home = objects if isinstance(objects, HomeObjects) else None
        stored: Objects = self._home.on_disk() if self._home else objects
        written = numbers(stored, prefix_of(model))
        self._writer = NumberedWriter(stored, prefix_of(model), written[-1] if written else 0)
        self._waiting = [each for each in decisions if each.seq > self._writer.seq]

    @property
    def waiting(self) -> int:
        """How many decisions are not on disk yet."""
        return len(self._waiting)

    def append(self, decision: Decision, *, urgent: bool = False) -> Decision:
        """Returns the decision with its number, once its object exists. An urgent one counts also where the disk of
        this machine does not take it: it waits, and `flush` writes it."""
        numbered = replace(decision, seq=self._writer.seq + len(self._waiting) + 1)
        self._waiting.append(numbered)
        try:
            self.flush()
        except OSError:
            if not urgent or self._home is None:
                self._waiting.pop()
                raise
            # Where memory is full as well, this process alone knows it.
            self._home.keep(numbered_key(prefix_of(self._model), numbered.seq), self._dump(numbered))
        except BaseException:
            self._waiting.pop()
            raise
        self._journals.cache.put(self._model, numbered)
        self._count += 1
        return numbered

    def flush(self) -> None:
        """Writes the decisions that wait, oldest first. Raises OSError while the disk does not take them."""
        leadership, term = self._journals.leadership, self._journals.term
        while self._waiting:
            leadership.check(term)
            oldest = self._waiting[0]
            try:
                self._writer.append(partial(self._dump, oldest))
            except ObjectExists as error:
                leadership.lose(term)
                raise LeadershipLost(leader=f"{error.key} is not this one's") from error
            if self._home:
                self._home.drop(numbered_key(prefix_of(self._model), oldest.seq))
            self._waiting.pop(0)

    def _dump(self, decision: Decision, _: int = 0) -> bytes:
        journals = self._journals
        return dump_decision(decision, Writer(holder=journals.leadership.holder, term=journals.term))

    def all(self) -> list[Decision]:
        known = [each for each in self._journals.cache.all(self._model) if each.seq <= self._writer.seq]
        return [*known, *self._waiting]

    def compact(self, keep: Keep) -> bool:
        """Removes the decisions not in `keep`, if there are many and they have doubled since; True when it did."""
        if self._count < self._compact_at:
            return False
        self._compact_at = 2 * self._count  # also when it fails: not again with each decision
        decisions, journals = self.all(), self._journals
        journals.leadership.check(journals.term)
        removed = _removable(decisions, {*keep(decisions), decisions[-1].seq}, journals.young_s)
        for seq in removed:
            journals.objects.remove(numbered_key(prefix_of(self._model), seq))
        self._count = len(decisions) - len(removed)
        self._compact_at = max(journals.compact_at, 2 * self._count)
        return True


def _removable(known: Sequence[Decision], kept: set[int], young_s: float) -> list[int]:
    newest = known[-1].t
    return [each.seq for each in known if each.seq not in kept and newest - each.t >= young_s]
