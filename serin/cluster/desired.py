"""Writes what the hosts are to run and route, and shows the gateways of all hosts as one router.

Each change is the next numbered object; a lost race ends the term.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from serin.cluster.hosts import Hosts
from serin.errors import GatewayRejected, LeadershipLost, ObjectExists, StoreUnreachable
from serin.formats.cluster.desired_state import PREFIX, DesiredState, EvidenceArm
from serin.rollout.decide.state import Phase, Rollout
from serin.rollout.run.leadership import Leads
from serin.store.artifacts import Endpoint, ModelRoute, Release
from serin.store.numbered import NumberedWriter, numbered_key, numbers
from serin.store.objects import Objects

_KEEP: Final = 200
_YOUNG_S: Final = 3600.0
_IN_FORCE_S: Final = 8.0  # longer than it takes to notice that a gateway is silent
_POLL_S: Final = 0.25
_EPOCHS: Final = 16

HOSTS: Final = "hosts"  # the part of the evidence that says how far each host's objects were counted


def newest_state(objects: Objects, *, after: int = 0) -> DesiredState | None:
    """Returns the newest desired state above a number; None: there is none. Raises StoreUnreachable."""
    while found := numbers(objects, PREFIX, after=after):
        stored = objects.read(numbered_key(PREFIX, found[-1]))
        if stored is not None:
            return DesiredState.load(stored.content)
    return None


class DesiredStates:
    """The newest desired state, which this process alone changes in its term."""

    def __init__(self, objects: Objects, leadership: Leads, term: int, now: Callable[[], float]) -> None:
        self._objects, self._leadership, self._term, self._now = objects, leadership, term, now
        found = newest_state(objects)
        self.state = found or DesiredState(seq=0, term=0, by="", t=0.0)
        self._writer = NumberedWriter(objects, PREFIX, self.state.seq)

    def affirm(self) -> None:
        """Writes the state again with this term: a controller that led before cannot write its next one any more."""
        self._write(self.state)

    def change(self, **changes: Any) -> bool:
        """Writes the next state if something changes; returns whether it does. It is in force once this returns."""
        wanted = replace(self.state, **changes)
        if wanted == self.state:
            return False
        self._write(wanted)
        return True

    def _write(self, wanted: DesiredState) -> None:
        self._leadership.check(self._term)
        wanted = replace(
            wanted, term=self._term, by=self._leadership.holder, t=self._now(), seq=self._writer.seq + 1
        )
        try:
            self._writer.append(lambda _: wanted.dump())
        except ObjectExists as error:
            self._leadership.lose(self._term)
            raise LeadershipLost(leader=f"{error.key} is not this one's") from error
        self.state = wanted
        if wanted.seq % _KEEP == 0:
            with contextlib.suppress(StoreUnreachable):  # the next time, then
                self._remove_old()

    def _remove_old(self) -> None:
        """Removes old states. A number must not be free again while a process may still want to write it."""
        found = numbers(self._objects, PREFIX)
        if len(found) < 2 * _KEEP:
            return
        boundary = self._objects.read(numbered_key(PREFIX, found[-_KEEP]))
        if boundary and self._now() - DesiredState.load(boundary.content).t > _YOUNG_S:
            for seq in found[:-_KEEP]:
                self._objects.remove(numbered_key(PREFIX, seq))


class ClusterRouter:
    """`rollouts`: the controller's, whose evidence the gateways gather. `endpoint_of`: the address of a release that no
    agent runs; None: agents run it. `wait`: sleeps for some seconds."""

    def __init__(
        self,
        desired: DesiredStates,
        hosts: Hosts,
        *,
        rollouts: Callable[[], Sequence[Rollout]],
        timeouts_of: Callable[[ModelRoute], Mapping[str, Any]],
        endpoint_of: Callable[[Release], Endpoint | None],
        wait: Callable[[float], object],
        steady: Callable[[], float],
    ) -> None:
        self._desired, self._hosts, self._rollouts = desired, hosts, rollouts
        self._timeouts_of, self._endpoint_of = timeouts_of, endpoint_of
        self._wait, self._steady = wait, steady
        self._routed_by = desired.state.seq  # the desired state with the newest routes

    def apply(self, routes: Sequence[ModelRoute]) -> None:
        """Writes the routes and waits until every gateway that is not silent has them in force. Each gateway finds
        out by itself which releases it reaches."""
        shadowing = {now.model for now in self._rollouts() if now.phase is Phase.SHADOWING}
        released = {release for route in routes for release in route.releases}
        changed = self._desired.change(
            routes=tuple(routes),
            timeouts={route.model: dict(self._timeouts_of(route)) for route in routes if route.releases},
            endpoints={
                release.name: place for release in sorted(released) if (place := self._endpoint_of(release))
            },
            arms=arms(self._rollouts(), self._desired.state),
            replays={model: job for model, job in self._desired.state.replays.items() if model in shadowing},
        )
        if changed:
            self._routed_by = self._desired.state.seq
        self._wait_until_in_force()

    def active_requests(self, release: Release) -> int:
        """Returns the requests in flight at all gateways that report, and those arriving there that may be its."""
        reports = [self._hosts.reports[host] for host in self._hosts.reporting]
        found = [report.releases.get(release.name) for report in reports]
        at_release = sum(report.active_requests for report in found if report)
        return at_release + sum(report.arriving_requests for report in reports)

    def _wait_until_in_force(self) -> None:
        end = self._steady() + _IN_FORCE_S
        while late := self._late():
            if self._steady() >= end:
                what = f"the desired state {self._routed_by}"
                raise GatewayRejected(what=what, reason=f"it is not in force at {', '.join(late)} yet")
            self._wait(_POLL_S)
            self._hosts.refresh()

    def _late(self) -> list[str]:
        """Returns the gateways that have older routes. Raises GatewayRejected for one that rejected them."""
        late = []
        for host in self._hosts.reporting:
            report = self._hosts.reports[host]
            if report.desired_seq < self._routed_by:
                if report.problem:
                    raise GatewayRejected(what="the new routes", reason=f"host {host}: {report.problem}")
                late.append(host)
        return late


def arms(rollouts: Sequence[Rollout], before: DesiredState) -> dict[str, EvidenceArm]:
    """Returns what gateways need to cut their requests, for each rollout that gathers evidence."""
    found = {}
    for now in rollouts:
        if now.phase not in (Phase.SHIFTING, Phase.BAKING):
            continue
        known = before.arms.get(now.model)
        shares = dict(known.shares) if known and known.rollout == now.id else {}
        shares[now.epoch] = now.weight_percent / 100
        found[now.model] = EvidenceArm(
            rollout=now.id,
            candidate=now.candidate.name,
            stable=now.stable.name if now.stable else "",
            since_epoch=now.evidence_epoch,
            since_t=now.evidence_from,
            shares=dict(sorted(shares.items())[-_EPOCHS:]),
            plan=now.plan.to_json(),
            resume=known.resume if known and known.rollout == now.id else _counted(now),
        )
    return found


def _counted(now: Rollout) -> dict[str, tuple[int, Mapping[str, Any]]]:
    places = now.evidence.get(HOSTS, {}).items()
    return {host: (seq, course[0]) for host, (seq, _, *course) in places if course and course[0]}
