"""The gateways of all hosts as one router: routes are the desired state, in force once every gateway reports so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from serin.errors import GatewayRejected
from serin.formats.cluster.desired_state import DesiredState, EvidenceArm
from serin.rollout.cluster.desired import DesiredStates
from serin.rollout.cluster.hosts import Hosts
from serin.rollout.decide.state import Phase, Rollout
from serin.store.artifacts import Endpoint, ModelRoute, Release

_IN_FORCE_S: Final = 8.0  # longer than it takes to notice that a gateway is silent
_POLL_S: Final = 0.25
_EPOCHS: Final = 16


class ClusterRouter:
    """`rollouts`: the controller's, whose evidence the gateways gather. `endpoint_of`: the address of a release that no
    agent runs; None: agents run them all. `wait`: sleeps for some seconds."""

    def __init__(
        self,
        desired: DesiredStates,
        hosts: Hosts,
        *,
        rollouts: Callable[[], Sequence[Rollout]],
        timeouts_of: Callable[[Release], Mapping[str, Any]],
        endpoint_of: Callable[[Release], Endpoint] | None,
        wait: Callable[[float], object],
        steady: Callable[[], float],
    ) -> None:
        self._desired, self._hosts, self._rollouts = desired, hosts, rollouts
        self._timeouts_of, self._endpoint_of = timeouts_of, endpoint_of
        self._wait, self._steady = wait, steady
        self._routed_by = desired.state.seq  # the desired state with the newest routes

    def apply(
        self, routes: Sequence[ModelRoute], *, waiting: Collection[str] = (), missing: Collection[str] = ()
    ) -> None:
        """Writes the routes and waits until every gateway that is not silent has them in force. Each gateway finds
        out by itself which releases it reaches."""
        del waiting, missing
        leading = [(route.model, route.stable or route.candidate) for route in routes]
        released = {release for route in routes for release in route.releases}
        changed = self._desired.change(
            routes=tuple(routes),
            timeouts={model: dict(self._timeouts_of(release)) for model, release in leading if release},
            endpoints={release.name: self._endpoint_of(release) for release in released}
            if self._endpoint_of
            else {},
            arms=arms(self._rollouts(), self._desired.state),
        )
        if changed:
            self._routed_by = self._desired.state.seq
        self._wait_until_in_force()

    def active_requests(self, release: Release) -> int:
        """Returns the requests in flight at all gateways that report."""
        found = (self._hosts.reports[host].releases.get(release.name) for host in self._hosts.reporting)
        return sum(report.active_requests for report in found if report)

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
        )
    return found
