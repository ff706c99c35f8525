"""Decides what an agent does with the releases of its host, and what its gateway routes to. Pure.

A release runs here if the desired state names this host for it. One that is not named any more gets no new requests,
answers those in flight, and is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from serin.formats.cluster.desired_state import DesiredState
from serin.formats.cluster.host_report import ReleaseReport
from serin.rollout.decide.advance import ReleaseState
from serin.rollout.run.reconciler import Patience
from serin.store.artifacts import Endpoint, ModelRoute, Release

Action = Literal["nothing", "start", "verify", "stop"]

_DEAD_S: Final = 10.0  # it may be busy or about to be restarted: killing it then makes it worse
_DRAIN_S: Final = 60.0  # or as long as a request may take


@dataclass(slots=True)
class Memory:
    """What was done and seen for one release. It may be lost: then a release is verified again."""

    started: Patience = field(default_factory=Patience)
    ready_at: float | None = None
    problem: str = ""  # why it could not be started
    leaving_since: float | None = None
    verifying: int | None = None  # the process whose golden rows are being checked
    verify_at: float = 0.0  # not earlier
    verified: dict[int, str] = field(default_factory=dict)  # by process: "" or the problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A release on this host now. `active_requests`: of this gateway."""

    state: ReleaseState
    instance: int | None = None
    active_requests: int = 0


def wanted_here(desired: DesiredState, host: str) -> set[Release]:
    return {Release.parse(name) for name, hosts in desired.hosts.items() if host in hosts}


def next_action(
    memory: Memory, seen: Seen, *, wanted: bool, unrouted: bool, longest_request_s: float, t: float
) -> Action:
    """Returns what to do with one release. `unrouted`: this gateway sends it nothing new. Updates `memory`."""
    if seen.state == "ready":
        memory.ready_at = t
        memory.started.done()
    if not wanted:
        return _leave(memory, seen, unrouted=unrouted, longest_request_s=longest_request_s, t=t)
    memory.leaving_since = None
    if seen.state == "ready":
        known = seen.instance is None or seen.instance in memory.verified
        busy = memory.verifying is not None or t < memory.verify_at
        return "nothing" if known or busy else "verify"
    if t < memory.started.at or seen.state == "starting":
        return "nothing"
    dead_for = t - memory.ready_at if memory.ready_at is not None else _DEAD_S
    if seen.state == "absent" or dead_for >= _DEAD_S:
        # Even if it starts: a process that dies at once must not be restarted in a loop.
        memory.started.failed(t)
        return "start"
    return "nothing"


def _leave(memory: Memory, seen: Seen, *, unrouted: bool, longest_request_s: float, t: float) -> Action:
    if not unrouted:
        memory.leaving_since = None
        return "nothing"
    if memory.leaving_since is None:
        memory.leaving_since = t
    patience_s = max(_DRAIN_S, longest_request_s)
    # Not in the moment in which routes changed.
    drained = seen.active_requests == 0 and t > memory.leaving_since
    return "stop" if drained or t - memory.leaving_since > patience_s else "nothing"


def report(memory: Memory, seen: Seen) -> ReleaseReport:
    return ReleaseReport(
        state=seen.state,
        instance=seen.instance,
        verified=None if seen.instance is None else memory.verified.get(seen.instance),
        problem=memory.problem,
        active_requests=seen.active_requests,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What the gateway is given. `problem`: what of the desired state it cannot do now; `blocked`: nothing is applied,
    because traffic would go elsewhere than decided. `waiting`: models whose live release answers nowhere yet;
    `missing`: those that have no route."""

    routes: tuple[ModelRoute, ...]
    endpoints: Mapping[str, Endpoint]
    peers: Mapping[str, tuple[str, ...]]
    leaving: frozenset[str] = frozenset()
    problem: str = ""
    blocked: bool = False
    waiting: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def gateway_table(
    desired: DesiredState,
    *,
    here: Mapping[str, tuple[Endpoint, ReleaseReport]],
    peers: Mapping[str, Sequence[str]],
    others: Mapping[str, Sequence[str]],
    leaving: Iterable[str],
) -> Table:
    """Returns the routes of the desired state with the addresses of their releases.

    `here`: the releases that have a process on this host. `peers`: by release, the gateways of hosts on which it is
    ready; `others`: of all hosts that should have it. A release of this host that does not answer, or answers wrongly,
    is used only where no peer has it; peers on which it is not ready, only where nothing else is left: clients then
    get "unavailable", and not "no such model".
    """
    named = {release.name for route in desired.routes for release in route.releases}
    away = frozenset(leaving) - named
    endpoints = dict(desired.endpoints)
    for name, (endpoint, found) in here.items():
        good = found.state == "ready" and not found.verified
        if good or not peers.get(name):
            endpoints[name] = endpoint
    found_at = {name: tuple(sorted(places)) for name, places in peers.items() if places and name not in away}
    for name in named - {*endpoints, *found_at}:
        if others.get(name):
            found_at[name] = tuple(sorted(others[name]))
    reachable = {*endpoints, *found_at}
    answering = {*desired.endpoints, *(name for name, places in peers.items() if places)}
    answering |= {name for name, (_, found) in here.items() if found.state == "ready" and not found.verified}
    routes, missing, blocked = [], [], False
    for route in desired.routes:
        lost = [release for release in route.releases if release.name not in reachable]
        missing += [release.name for release in lost]
        blocked |= any(release in lost for release in route.judged)
        if route.stable is None or route.stable in lost:
            continue
        routes.append(route.without(lost))
    problem = f"not reachable from this host: {', '.join(sorted(missing))}" if missing else ""
    return Table(
        routes=tuple(routes),
        endpoints=endpoints,
        peers=found_at,
        leaving=away & {*endpoints},
        problem=problem,
        blocked=blocked,
        waiting=tuple(route.model for route in routes if route.stable and route.stable.name not in answering),
        missing=tuple(
            route.model for route in desired.routes if route.stable and route.stable.name not in reachable
        ),
    )
