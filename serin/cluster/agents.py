"""Releases on the hosts of agents: started and stopped by the desired state, seen by the hosts' reports.

A release is placed on its hosts when it is started and stays there, unless a host is forgotten or lost: then another
one takes its place. Silent hosts keep their last report, and the judge holds the rollout until they report again.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from serin.cluster.desired import DesiredStates
from serin.cluster.hosts import Hosts
from serin.errors import ReleaseFailed, ReleaseNotReady
from serin.formats.cluster.host_report import ReleaseReport
from serin.rollout.decide.advance import ReleaseState
from serin.store.artifacts import Endpoint, Release

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.2
_RETURN_S: Final = 60.0  # a host that reports again has this long to have its releases ready


class AgentProcesses:
    """The port `Processes` over agents. `replicas_of`: how many hosts run a release; None: all."""

    def __init__(
        self,
        desired: DesiredStates,
        hosts: Hosts,
        replicas_of: Callable[[Release], int | None],
        steady: Callable[[], float],
        *,
        poll_s: float = _POLL_S,
    ) -> None:
        self._desired, self._hosts, self._replicas_of, self._steady = desired, hosts, replicas_of, steady
        self._poll_s = poll_s
        self._closed = threading.Event()
        self._instances: dict[tuple[str, str], int] = {}  # by release and host
        self._restarts: dict[str, int] = {}  # by release: restarts that were seen
        self._away: dict[str, float] = {}  # hosts that were silent: when that was seen last
        # Releases on hosts that took another's place, until they are ready.
        self._joining: set[tuple[str, str]] = set()

    def start(self, release: Release) -> None:
        """Places the release. Raises ReleaseNotReady when no host reports, or a host could not start it."""
        if self._hosts_of(release):
            for host, found in self._found(release).items():
                if found.problem:
                    raise ReleaseFailed(problem=self._at(host) + found.problem)
            return
        model, hosts, replicas = release.model, self._hosts.reporting, self._replicas_of(release)
        beside = place(model, {*hosts} & self._hosts_of_model(model), replicas)
        chosen = extend(beside, model, hosts, replicas)
        if not chosen:
            raise self._not_ready(release, "no host with an agent reports; start `serin agent` on one")
        self._desired.change(hosts={**self._desired.state.hosts, release.name: chosen})

    def stop(self, release: Release) -> None:
        hosts = {name: at for name, at in self._desired.state.hosts.items() if name != release.name}
        self._desired.change(hosts=hosts)

    def state(self, release: Release) -> ReleaseState:
        hosts = self._hosts_of(release)
        if not hosts:  # stopped; absent once no host has it any more
            return "starting" if release in self._reported() else "absent"
        found = self._found(release)
        if any(route.stable == release for route in self._desired.state.routes):  # it is live
            present = [found[host].state for host in found if not self._hosts.silent_s(host)]
            return _of_live(present)
        if any(report.problem and report.state == "absent" for report in found.values()):
            return "absent"  # so that it is started again, which raises the reason
        settled = [host for host in hosts if (release.name, host) not in self._joining]
        states = [self._state_at(release, host, found.get(host)) for host in settled or hosts]
        if "dead" in states:
            return "dead"
        return "ready" if all(state == "ready" for state in states) else "starting"

    def instance(self, release: Release) -> int | None:
        """Returns a number that changes when one of the release's processes was restarted under its host's eyes.

        A host that was silent may have been restarted, and everything on it: that is not the release's fault.
        """
        known = False
        for host, report in self._found(release).items():
            if report.instance is None:
                continue
            known, key = True, (release.name, host)
            before = self._instances.setdefault(key, report.instance)
            if before != report.instance:
                self._instances[key] = report.instance
                if host not in self._away:
                    self._restarts[release.name] = self._restarts.get(release.name, 0) + 1
        return 1 + self._restarts.get(release.name, 0) if known else None

    def endpoint(self, release: Release) -> Endpoint:
        """Returns a placeholder: each gateway knows where the release is."""
        if not self._hosts_of(release):
            raise self._not_ready(release, "no host runs it")
        return Endpoint(http=release.name, grpc=release.name)

    def verify(self, release: Release) -> None:
        """Waits until each of the release's hosts has checked its golden rows."""
        while not self._closed.wait(self._poll_s):
            hosts, found = self._hosts_of(release), self._found(release)
            if not hosts:
                raise self._not_ready(release, "it was stopped before its golden rows were checked")
            results = {host: found[host].verified if host in found else None for host in hosts}
            for host, verified in results.items():
                if verified:
                    raise ReleaseFailed(problem=self._at(host) + verified)
            if all(verified == "" for verified in results.values()):
                return
        raise self._not_ready(release, "the controller stepped down")

    def running(self) -> Sequence[Release]:
        wanted = {Release.parse(name) for name in self._desired.state.hosts}
        return sorted(wanted | self._reported())

    def close(self) -> None:
        """Ends verifications in progress."""
        self._closed.set()

    def tidy(self, settled: Sequence[Release]) -> None:
        """Notes which hosts are away, replaces lost and forgotten ones, and adds hosts to the releases in `settled`."""
        t = self._steady()
        self._away |= dict.fromkeys(self._hosts.silent, t)
        self._away = {host: at for host, at in self._away.items() if t - at < _RETURN_S}
        wanted, joined = {}, set()
        for name, at in self._desired.state.hosts.items():
            release = Release.parse(name)
            replicas = self._replicas_of(release) if release in settled else len(at)
            known = [host for host in at if host in self._hosts.reports]
            found = extend(known, release.model, self._hosts.reporting, replicas, self._hosts.lost)
            wanted[name] = found or at  # with no host left, those that return continue at once
            joined |= {(name, host) for host in wanted[name] if host not in at}
            for host in [host for host in at if host not in wanted[name]]:
                logger.warning("%s: host %s is gone; it runs on %s", name, host, ", ".join(wanted[name]))
        self._desired.change(hosts=wanted)
        self._joining = {each for each in self._joining | joined if not self._has_joined(*each)}

    def _has_joined(self, name: str, host: str) -> bool:
        """Returns whether a host that took another's place has the release ready, or is not to have it any more."""
        report = self._hosts.reports.get(host)
        found = report.releases.get(name) if report else None
        return host not in self._desired.state.hosts.get(name, ()) or bool(found and found.state == "ready")

    def _state_at(self, release: Release, host: str, report: ReleaseReport | None) -> ReleaseState:
        """Returns the state on one host. A host that was silent has some time to have it ready again."""
        state: ReleaseState = report.state if report else "starting"
        if state == "ready" or host not in self._away:
            return "starting" if state == "absent" else state
        return "ready" if (release.name, host) in self._instances else "starting"

    def _hosts_of(self, release: Release) -> tuple[str, ...]:
        return self._desired.state.hosts.get(release.name, ())

    def _hosts_of_model(self, model: str) -> set[str]:
        """Returns the hosts of the model's releases: those that are compared run on the same machines."""
        found = self._desired.state.hosts.items()
        return {host for name, at in found if Release.parse(name).model == model for host in at}

    def _found(self, release: Release) -> dict[str, ReleaseReport]:
        """Returns the newest reports about a release, by host."""
        return {
            host: report
            for host in self._hosts_of(release)
            if host in self._hosts.reports
            and (report := self._hosts.reports[host].releases.get(release.name)) is not None
        }

    def _reported(self) -> set[Release]:
        """Returns the releases that hosts which are not silent still have."""
        return {
            Release.parse(name)
            for host in self._hosts.reporting
            for name, found in self._hosts.reports[host].releases.items()
            if found.state != "absent"
        }

    def _at(self, host: str) -> str:
        """Returns the beginning of a sentence about one host; empty where there is no other one."""
        return f"host {host}: " if len(self._hosts.reports) > 1 else ""

    def _not_ready(self, release: Release, reason: str) -> ReleaseNotReady:
        return ReleaseNotReady(release=release.name, reason=reason, log="the log of the agent")


def _of_live(states: Sequence[ReleaseState]) -> ReleaseState:
    """Returns the state of a live release by its hosts that report: one that is ready is enough."""
    if "ready" in states:
        return "ready"
    return "dead" if states and all(state == "dead" for state in states) else "starting"


def place(model: str, hosts: Iterable[str], replicas: int | None) -> tuple[str, ...]:
    """Returns the hosts of a model's releases, sorted; `replicas` None: all of `hosts`.

    Hosts are chosen by rendezvous hashing of the model's name: all releases of a model are on the same hosts, and a
    host that comes or goes moves no other. So arms that are compared run on the same machines.
    """
    ranked = sorted(hosts, key=lambda host: hashlib.sha256(f"{model}\0{host}".encode()).digest())
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
