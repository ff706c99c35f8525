"""Decides what a host does next from what it sees of the others. Pure: a view goes in, a decision comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from serin.training.launch.together.meeting import View
from serin.training.launch.together.round import Member, Round

GATHER_S = 60.0  # with fewer than all hosts, but enough: so long for the others to come


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
