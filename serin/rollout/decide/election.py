"""Decides who leads, from the leader's record and how long it has not changed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from serin.formats.cluster.leader import Leader

RENEW_S: Final = 1.0  # a leader renews its record this often
VALID_S: Final = 4.0  # a leader acts only for this long after it began to renew
SILENT_S: Final = 5.0  # a record that has not changed for this long may be taken over


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A record (None: there is none), and when it was first seen like this, by the watcher's own clock."""

    leader: Leader | None
    since: float


def look(before: Watch | None, leader: Leader | None, t: float) -> Watch:
    """Returns what is known after a look at time `t`."""
    return before if before is not None and before.leader == leader else Watch(leader=leader, since=t)


def claim(watch: Watch, t: float, me: str) -> Leader | None:
    """Returns the record with which `me` may try to take over now; None: it is too early.

    A record with my own name is one whose leadership I gave up, because I was not sure of what I had written.
    """
    leader = watch.leader
    if leader is None:
        return Leader(holder=me, term=1)
    if leader.holder in ("", me) or t - watch.since >= SILENT_S:
        return Leader(holder=me, term=leader.term + 1)
    return None


def may_act(renewed_at: float, t: float) -> bool:
    """Returns whether a leader that began its last successful renewal at `renewed_at` may act at `t`."""
    return t - renewed_at <= VALID_S
