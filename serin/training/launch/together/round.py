"""The objects by which hosts that train together agree, below `trainings/<run>/` in the store.

    members/<host>.json   one writer, about each second: a launcher that is there
    rounds/<seq>.json     numbered, of several writers one wins: who trains with how many ranks, from which step
    ends/<seq>.json       how a round ended, when it ended by itself

A round ends without such an object when one of its hosts is lost: the next one is then made of those that remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serin.machine.typed_json import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(Document):
    """A launcher that wants to train. `instance`: differs for each start of a launcher. `gpus`: how many it may use;
    None: it trains on the CPU, with any number of ranks. `port`: free on its host."""

    host: str
    instance: str
    address: str
    port: int
    processes: int
    gpus: int | None
    beat: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The part of one host in a round."""

    host: str
    instance: str
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round(Document):
    """`places`: the first has rank 0, which writes. `step`: of the checkpoint to resume from; 0: from the start.
    `choices`: choices.json of the run, when there is one."""

    seq: int
    by: str
    places: tuple[Place, ...]
    address: str  # of the first host ...
    port: int  # ... where ranks meet
    step: int = 0
    choices: str | None = None

    @property
    def ranks(self) -> int:
        return sum(place.ranks for place in self.places)

    def place_of(self, host: str, instance: str) -> int | None:
        """The number of a launcher in this round; None when it is not part of it."""
        named = [(place.host, place.instance) for place in self.places]
        return named.index((host, instance)) if (host, instance) in named else None


def distribute(members: Sequence[Member], ranks: int, *, batch_rows: int | None = None) -> tuple[Place, ...]:
    """Places for `ranks` ranks, as even as the members allow; members that get none are left out.

    A member without GPUs takes any number, so that the number of ranks, and with it the result, does not depend on how
    many hosts remain. Where GPUs are too few, there are fewer ranks: as many as divide `batch_rows`.
    """
    rooms = [ranks if member.gpus is None else member.gpus for member in members]
    wanted = min(ranks, sum(rooms))
    while batch_rows is not None and wanted > 1 and batch_rows % wanted:
        wanted -= 1
    given = [0] * len(members)
    for _ in range(wanted):
        free = [number for number, room in enumerate(rooms) if given[number] < room]
        given[min(free, key=lambda number: (given[number], number))] += 1
    return tuple(
        Place(host=member.host, instance=member.instance, ranks=count)
        for member, count in zip(members, given, strict=True)
        if count
    )
