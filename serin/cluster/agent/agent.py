"""One host of several: brings its releases and its gateway to the desired state, and reports what it sees."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import fields, replace
from functools import partial
from typing import Any, Final

from serin.cluster.agent.link import Link
from serin.cluster.agent.reconcile import Memory, Seen, Table, gateway_table, next_action, report, wanted_here
from serin.cluster.agent.settings import AgentSettings
from serin.errors import ReleaseNotReady
from serin.formats.cluster.desired_state import DesiredState
from serin.formats.cluster.host_report import AgentReport, ReleaseReport
from serin.rollout.run.ports import Processes
from serin.rollout.run.verification import FOREIGN, TRANSIENT, in_thread
from serin.serving.envoy.gateway import Gateway
from serin.serving.envoy.routes import Timeouts
from serin.store.artifacts import Endpoint, Release

log = logging.getLogger(__name__)

_AGAIN_S: Final = 5.0  # between two attempts to check golden rows
_REAPPLY_S: Final = 5.0  # how often unchanged routes are pushed: the gateway may be a new process
_SAYS_NOTHING: Final = (*TRANSIENT, OSError, ReleaseNotReady)  # golden rows could not be asked for


class Agent:
    """One host. `fleet` None: releases run elsewhere, and only the gateway is here."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        gateway: Gateway,
        fleet: Processes | None,
        link: Link,
        beside: Callable[[Callable[[], None]], Future[None]] = in_thread,
        clock: Callable[[], float] = time.monotonic,
        windows: Callable[[Mapping[str, Mapping[str, Any]]], None] = lambda _: None,
        events: str | None = None,
    ) -> None:
        """`windows`: is given the plans of the models whose windows are computed here, before they are routed.
        `events`: where their events are kept for all hosts."""
        self._settings, self._gateway, self._fleet, self._link = settings, gateway, fleet, link
        self._beside, self._clock, self._windows, self._events = beside, clock, windows, events
        self._memories: dict[Release, Memory] = {}
        self._in_force = 0
        self._leaving: frozenset[str] = frozenset()
        self._arriving = 0
        self._told: dict[str, str] = {}
        self._problem = ""
        self._applied: tuple[Table, dict[str, Timeouts]] | None = None
        self._apply_again_at = 0.0
        self._releases: dict[str, ReleaseReport] = {}

    def tick(self) -> AgentReport:
        """Runs one round and returns what it reports. An error of one release does not keep the others waiting."""
        desired = self._link.desired
        running = self._look()
        if desired is not None and running is not None:
            self._act(desired, running)
            self._route(desired, running)
        self._arriving = self._count(self._gateway.arriving_requests)
        if running is not None:
            self._releases = {
                release.name: report(self._memory(release), seen)
                for release, seen in self._counted(running, desired).items()
            }
        found = AgentReport(
            host=self._settings.host,
            beat=0,
            t=time.time(),
            address=self._settings.gateway_address,
            peer=self._settings.peer_address,
            desired_seq=self._in_force,
            evidence_seq=0,
            releases=self._releases,
            problem=self._problem,
            arriving_requests=self._arriving,
            events=self._events,
        )
        self._link.tell(found)
        return found

    def _look(self) -> dict[Release, Seen] | None:
        """Returns the releases that this host runs, or should run; None: the supervisor does not say."""
        if self._fleet is None:
            return {}
        desired = self._link.desired
        wanted = wanted_here(desired, self._settings.host) if desired else set()
        try:
            known = {*self._fleet.running(), *wanted}
        except FOREIGN as error:
            self._tell("releases", str(error))
            self._problem = str(error)
            return None
        self._told.pop("releases", None)
        found = {}
        for release in sorted(known):
            try:
                found[release] = Seen(
                    state=self._fleet.state(release), instance=self._fleet.instance(release)
                )
            except FOREIGN as error:
                self._tell(release.name, str(error))
                found[release] = Seen(state="starting")
        return found

    def _counted(self, running: Mapping[Release, Seen], desired: DesiredState | None) -> dict[Release, Seen]:
        """Adds the requests in flight of releases that get no new ones: those may be waited for."""
        busy = {release for route in desired.routes for release in route.busy} if desired else set()
        return {
            release: seen
            if release in busy
            else replace(seen, active_requests=self._count(partial(self._gateway.active_requests, release)))
            for release, seen in running.items()
        }

    def _count(self, requests: Callable[[], int]) -> int:
        try:
            return requests()
        except FOREIGN:  # a gateway that does not answer has no requests
            return 0

    def _act(self, desired: DesiredState, running: Mapping[Release, Seen]) -> None:
        assert self._fleet is not None or not running, "only a fleet has releases"
        wanted, t = wanted_here(desired, self._settings.host), self._clock()
        longest_s = self._gateway.longest_request_s() if self._leaving else 0.0
        for release, seen in self._counted(running, desired).items():
            memory = self._memory(release)
            action = next_action(
                memory,
                replace(seen, active_requests=seen.active_requests + self._arriving),
                wanted=release in wanted,
                unrouted=release.name in self._leaving,
                longest_request_s=longest_s,
                t=t,
            )
            if action == "verify" and seen.instance is not None:
                self._verify(release, memory, seen.instance)
            elif action in ("start", "stop"):
                self._change(release, memory, action)
        for gone in {*self._memories} - {*running}:
            del self._memories[gone]

    def _change(self, release: Release, memory: Memory, action: str) -> None:
        assert self._fleet is not None, "only a fleet has releases"
        log.info("%s: %s", release.name, "starting it" if action == "start" else "stopping it")
        try:
            (self._fleet.start if action == "start" else self._fleet.stop)(release)
            memory.problem = ""
        except FOREIGN as error:
            memory.problem = "" if isinstance(error, TRANSIENT) else str(error)
            self._tell(release.name, str(error))

    def _verify(self, release: Release, memory: Memory, instance: int) -> None:
        fleet = self._fleet
        assert fleet is not None, "only a fleet has releases"
        memory.verifying = instance
        work = self._beside(lambda: fleet.verify(release))

        def done(finished: Future[None]) -> None:
            error = finished.exception()
            if error is None or not isinstance(error, _SAYS_NOTHING):
                memory.verified = {instance: str(error or "")}
                log.info("%s (process %d): golden rows: %s", release.name, instance, error or "right")
            else:
                log.warning("%s: its golden rows cannot be checked: %s", release.name, error)
                memory.verify_at = self._clock() + _AGAIN_S
            memory.verifying = None

        work.add_done_callback(done)

    def _route(self, desired: DesiredState, running: Mapping[Release, Seen]) -> None:
        """Applies the desired routes; where that is not possible, the earlier ones stay in force."""
        wanted = wanted_here(desired, self._settings.host)
        here = self._here(running)
        named = {*desired.hosts, *(release.name for route in desired.routes for release in route.releases)}
        table = gateway_table(
            desired,
            here=here,
            peers=self._link.peers_of(named),
            others=self._link.others_of(desired),
            leaving=[release.name for release in running if release not in wanted],
        )
        self._problem = table.problem
        if table.blocked or (table.problem and not self._link.knows_peers):
            self._tell("gateway", table.problem)
            return
        try:
            self._apply(desired, table)
        except FOREIGN as error:
            self._problem = str(error)
            self._tell("gateway", str(error))
            return
        if self._in_force != desired.seq:
            log.info("desired state %d by %s is in force", desired.seq, desired.by)
        self._in_force, self._leaving = desired.seq, table.leaving
        if not table.problem:
            self._told.pop("gateway", None)

    def _apply(self, desired: DesiredState, table: Table) -> None:
        timeouts = {model: _timeouts(limits) for model, limits in desired.timeouts.items()}
        t, applied = self._clock(), (table, timeouts)
        if applied == self._applied and t < self._apply_again_at:
            return
        self._applied = None
        self._windows({model: each.windows for model, each in timeouts.items() if each.windows is not None})
        self._gateway.apply(
            table.routes,
            table.endpoints,
            timeouts,
            peers=table.peers,
            leaving=table.leaving,
            waiting=table.waiting,
            missing=table.missing,
        )
        self._applied, self._apply_again_at = applied, t + _REAPPLY_S

    def _here(self, running: Mapping[Release, Seen]) -> dict[str, tuple[Endpoint, ReleaseReport]]:
        found = {}
        for release, seen in running.items():
            try:
                assert self._fleet is not None, "only a fleet has releases"
                found[release.name] = (self._fleet.endpoint(release), report(self._memory(release), seen))
            except (ReleaseNotReady, OSError):
                continue
        return found

    def _memory(self, release: Release) -> Memory:
        return self._memories.setdefault(release, Memory())

    def _tell(self, about: str, trouble: str) -> None:
        """Logs a problem once, not at every tick."""
        if self._told.get(about) != trouble:
            self._told[about] = trouble
            log.warning("%s: %s", about, trouble)


def _timeouts(limits: Mapping[str, Any]) -> Timeouts:
    """Reads limits, without those that only a newer controller knows."""
    known = {limit.name for limit in fields(Timeouts)}
    return Timeouts(**{name: value for name, value in limits.items() if name in known})
