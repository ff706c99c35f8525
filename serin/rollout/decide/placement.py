"""Decides which hosts run a release. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence


def place(model: str, hosts: Iterable[str], replicas: int | None) -> tuple[str, ...]:
    """Returns the hosts of a model's releases, sorted; `replicas` None: all of `hosts`.

    Hosts are chosen by rendezvous hashing of the model's name: all releases of a model are on the same hosts, and a
    host that comes or goes moves no other. So arms that are compared run on the same machines.
    """
    ranked = sorted(hosts, key=lambda host: _rank(model, host))
    return tuple(sorted(ranked if replicas is None else ranked[:replicas]))


def extend(
    now: Sequence[str], model: str, hosts: Iterable[str], replicas: int | None, lost: Collection[str] = ()
) -> tuple[str, ...]:
    """Returns `now` with the hosts that it lacks for `replicas`. Hosts in `lost` do not count: each of them leaves when
    another host takes its place. No other host is taken away."""
    there = {host for host in now if host not in lost}
    wanted = [host for host in place(model, hosts, replicas) if host not in there]
    room = len(wanted) if replicas is None else max(replicas - len(there), 0)
    there.update(wanted[:room])
    gone = [host for host in now if host in lost]
    return tuple(sorted([*there, *(gone if replicas is None else gone[: max(replicas - len(there), 0)])]))


def _rank(model: str, host: str) -> bytes:
    return hashlib.sha256(f"{model}\0{host}".encode()).digest()
