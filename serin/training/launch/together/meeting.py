"""Where launchers on several hosts meet: each writes that it is there, and reads who else is and what was agreed.

A thread does that about each second; `view` never waits. Who was seen to write within SILENT_S is there, by the clock
of who looks: clocks of hosts are never compared. The objects are below `trainings/<run>/` in the store:

    members/<host>.json   one writer, about each second: a launcher that is there
    rounds/<seq>.json     numbered, of several writers one wins: who trains with how many ranks, from which step
    ends/<seq>.json       how a round ended, when it ended by itself

A round ends without such an object when one of its hosts is lost: the next one is then made of those that remain.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, Self

from serin.errors import ObjectExists, StoreError
from serin.machine.ports import free_ports
from serin.machine.typed_json import Document
from serin.store.objects import Objects
from serin.training.launch.job import Status

logger = logging.getLogger(__name__)

SILENT_S = 10.0
_BEAT_S = 1.0
GATHER_S = 60.0  # with fewer than all hosts, but enough: so long for the others to come


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What was read last. `there`: the members who wrote lately."""

    there: Mapping[str, Member] = field(default_factory=dict)
    newest: Round | None = None
    end: Status | None = None  # of the newest round
    reached_s: float = 0.0  # ago: when the store was reached last
    looks: int = 0

    def lost(self, of: Round) -> list[str]:
        """The hosts of a round that are not there any more, or were started again."""
        present = {(member.host, member.instance) for member in self.there.values()}
        return [place.host for place in of.places if (place.host, place.instance) not in present]


class Meeting:
    def __init__(self, objects: Objects, run: str, me: Member) -> None:
        self._objects, self._prefix, self.me = objects, f"trainings/{run}", me
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[Member, float | None]] = {}  # and when its beat was seen to change
        self._view = View()
        self._reached = time.monotonic()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._stay, name="meeting", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()
        try:
            self._objects.remove(self._member_key(self.me.host))
        except StoreError as error:
            logger.info("%s", error)

    def view(self) -> View:
        with self._lock:
            return replace(self._view, reached_s=time.monotonic() - self._reached)

    def new_port(self) -> None:
        """Offers another free port from the next beat on."""
        (port,) = free_ports(1)
        self.me = replace(self.me, port=port)

    def come_again(self) -> None:
        """Leaves the present round: from the next beat on the others see a launcher that was started again."""
        self.me = replace(self.me, instance=secrets.token_hex(4))

    def propose(self, proposed: Round) -> None:
        """Makes it the next round, unless another host was faster."""
        try:
            self._objects.create(self._key("rounds", proposed.seq), proposed.dump())
        except ObjectExists:
            logger.debug("round %d was proposed by another host", proposed.seq)

    def finish(self, round_: Round, status: Status) -> None:
        """Reports how a round ended, unless another host did before."""
        try:
            self._objects.create(self._key("ends", round_.seq), status.model_dump_json().encode())
        except ObjectExists:
            logger.debug("the end of round %d was reported by another host", round_.seq)

    def _stay(self) -> None:
        beat, away = 0, False
        while not self._left.is_set():
            beat += 1
            try:
                self._objects.put(self._member_key(self.me.host), replace(self.me, beat=beat).dump())
                self._look()
                away = False
            except StoreError as error:
                if not away:
                    logger.info("%s; trying again", error)
                away = True
            self._left.wait(_BEAT_S)

    def _look(self) -> None:
        began = time.monotonic()
        keys = self._objects.keys(f"{self._prefix}/members/")
        self._seen = {host: seen for host, seen in self._seen.items() if self._member_key(host) in keys}
        for key in keys:
            found = self._objects.read(key)
            if found is None:
                continue
            member = Member.load(found.content)
            before, changed = self._seen.get(member.host, (None, None))
            if before is not None and (before.instance, before.beat) != (member.instance, member.beat):
                changed = time.monotonic()
            self._seen[member.host] = member, changed
        newest, end = self._newest(), None
        if newest is not None:
            ended = self._objects.read(self._key("ends", newest.seq))
            end = None if ended is None else Status.model_validate_json(ended.content)
        now = time.monotonic()
        there = {
            host: member
            for host, (member, changed) in self._seen.items()
            if changed is not None and now - changed < SILENT_S
        }
        with self._lock:
            self._reached = began
            self._view = View(there=there, newest=newest, end=end, looks=self._view.looks + 1)

    def _newest(self) -> Round | None:
        known = self._view.newest
        keys = self._objects.keys(
            f"{self._prefix}/rounds/", after=self._key("rounds", known.seq) if known else ""
        )
        if not keys:
            return known
        found = self._objects.read(keys[-1])
        return known if found is None else Round.load(found.content)

    def _member_key(self, host: str) -> str:
        return f"{self._prefix}/members/{host}.json"

    def _key(self, kind: Literal["rounds", "ends"], seq: int) -> str:
        return f"{self._prefix}/{kind}/{seq:08d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """How many hosts train together: `most`, or at least `begin` when no more come; at least `least` to continue."""

    least: int
    begin: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`work`: take part in the newest round. `propose`: make a round of `members`. `wait`: for `why`."""

    kind: Literal["work", "propose", "wait", "ended"]
    why: str = ""
    members: tuple[Member, ...] = ()


def next_step(view: View, me: Member, hosts: Hosts, *, after: int, waited_s: float, removed: int = 0) -> Step:
    """What the launcher `me` does now. `after`: the last round that it took part in, which is over for it. `removed`:
    the last round whose result is not in the store any more."""
    newest = view.newest
    if newest is not None and view.end is not None and view.end.state == "done" and newest.seq > removed:
        return Step(kind="ended")
    running = newest is not None and view.end is None and not view.lost(newest)
    if newest is not None and running and newest.seq > after:
        if newest.place_of(me.host, me.instance) is not None:
            return Step(kind="work")
        return Step(
            kind="wait", why="the others train already; this host takes over when one of them is lost"
        )
    if newest is not None and running and newest.seq == after:
        return Step(kind="wait", why="the others have not noticed yet")
    members = _members(view, newest, hosts)
    interrupted = newest is not None and (view.end is None or view.end.state == "again")
    continues = interrupted and any(
        newest is not None and newest.place_of(member.host, member.instance) is not None for member in members
    )
    wanted = hosts.least if continues else hosts.begin if waited_s >= GATHER_S else hosts.most
    if len(members) < wanted:
        names = ", ".join(member.host for member in members) or "none"
        return Step(kind="wait", why=f"{len(members)} of {wanted} hosts are here: {names}")
    proposer = min(view.there)
    if proposer != me.host:
        return Step(kind="wait", why=f"{proposer} forms the next round")
    return Step(kind="propose", members=members)


def _members(view: View, newest: Round | None, hosts: Hosts) -> tuple[Member, ...]:
    """Who takes part in the next round, sorted by name: those of the last one first, if there are too many."""
    before = {place.host for place in newest.places} if newest else set()
    chosen = sorted(view.there.values(), key=lambda member: (member.host not in before, member.host))
    return tuple(sorted(chosen[: hosts.most], key=lambda member: member.host))


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
