"""Has the hosts replay recorded requests to a candidate, and says which rollouts cannot have that.

A replay is a part of the desired state. Each host sends what its own gateway has recorded, so no request is sent by
two, and writes its reports as objects, which the controller removes once it has read them. The place of a replay is
that of each host.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from serin.cluster.desired import DesiredStates
from serin.cluster.hosts import Hosts
from serin.errors import ReplayEnded, RolloutRefused
from serin.formats.cluster.desired_state import ReplayJob, replay_prefix
from serin.rollout.decide.state import Rollout
from serin.rollout.run.verification import FOREIGN
from serin.serving.external import External
from serin.serving.triton.repository import serving_settings
from serin.spec.stored import stored_capture
from serin.store.artifacts import Endpoint, Release
from serin.store.objects import Objects
from serin.store.store import Store


class Replayer:
    """Replays recorded requests of the live version to a candidate, on the hosts that can reach it. `endpoint_of`: the
    address of a release that no agent runs; None: agents run it."""

    def __init__(
        self,
        objects: Objects,
        desired: DesiredStates,
        hosts: Hosts,
        store: Store,
        external: External,
        endpoint_of: Callable[[Release], Endpoint | None],
    ) -> None:
        self._objects, self._desired, self._hosts = objects, desired, hosts
        self._store, self._external, self._endpoint_of = store, external, endpoint_of

    def check(self, rollout: Rollout) -> None:
        """Raises RolloutRefused when requests of the live version are not recorded in a form that can be sent again."""
        live = rollout.stable
        if live is None:
            return
        if self._external.has(live):
            reason = "a server elsewhere has no bundle to compare its answers with; leave shadow out of rollout.steps"
            raise RolloutRefused(model=rollout.model, command="start", reason=reason)
        bundle = self._store.bundle(live.model, live.label)
        problem = stored_capture(Path(bundle.path)).not_replayable()
        if problem:
            reason = (
                f"shadow replays recorded requests of live version {live.version}: {problem} for this rollout (`serin "
                "rollout start --spec`)"
            )
            raise RolloutRefused(model=rollout.model, command="start", reason=reason)

    def start(self, rollout: Rollout, place: Mapping[str, Any]) -> HostsReplay:
        """Raises ReplayEnded while no host can send anything to the candidate."""
        assert rollout.plan.shadow is not None
        assert rollout.stable is not None
        candidate = rollout.candidate
        elsewhere, running = self._endpoint_of(candidate), self._desired.state.hosts.get(candidate.name, ())
        hosts = [host for host in self._hosts.reporting if elsewhere or host in running]
        if not hosts:
            raise ReplayEnded(reason="no host that could send recorded requests reports")
        serving = serving_settings(self._store.bundle(candidate.model, candidate.label))
        job = ReplayJob(
            run=secrets.token_hex(8),
            live=rollout.stable.name,
            candidate=candidate.name,
            address=elsewhere.http if elsewhere else None,
            timeout_s=serving.request_timeout,
            max_batch_rows=serving.max_batch_rows,
            share=rollout.plan.shadow.share,
            rows=rollout.plan.shadow.rows,
            places={host: dict(place.get(host, {})) for host in hosts},
        )
        self._desired.change(replays={**self._desired.state.replays, rollout.model: job})
        return HostsReplay(job, place, self._objects, self._hosts, lambda: self._stop(rollout.model, job))

    def _stop(self, model: str, job: ReplayJob) -> None:
        known = self._desired.state.replays
        if model in known and known[model].run == job.run:
            self._desired.change(replays={name: each for name, each in known.items() if name != model})


class HostsReplay:
    """A replay that runs."""

    def __init__(
        self,
        job: ReplayJob,
        place: Mapping[str, Any],
        objects: Objects,
        hosts: Hosts,
        stop: Callable[[], None],
    ) -> None:
        self._job, self._objects, self._hosts, self._stop = job, objects, hosts, stop
        self._places = dict(place)
        self._waiting: dict[str, str] = {}  # by host: why it sends nothing
        self._ended: dict[str, str] = {}  # by host: why it sends nothing any more

    def take(self) -> Sequence[Mapping[str, Any]]:
        """Returns what was reported since the last call. ReplayEnded: no host sends any more."""
        found: list[Mapping[str, Any]] = []
        for key in self._objects.keys(replay_prefix(self._job.run)):
            stored = self._objects.read(key)
            host = key.split("/")[-2]
            for report in json.loads(stored.content) if stored else ():
                found += self._passed_on(host, report)
            self._objects.remove(key)
        sending = {host for host in self._job.places if host in self._hosts.reporting} - self._ended.keys()
        if not sending and not found:
            raise ReplayEnded(reason="; ".join(self._ended.values()) or "the hosts that replayed are silent")
        return found

    def _passed_on(self, host: str, report: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        if "ended" in report:
            self._ended[host] = str(report["ended"])
            return ()
        if "waiting" in report:
            self._waiting[host] = str(report["waiting"])
            return [report] if self._waiting.keys() >= self._job.places.keys() - self._ended.keys() else ()
        if "unable" in report:
            return [report]
        self._waiting.pop(host, None)
        self._places[host] = report["place"]
        return [{**report, "place": dict(self._places)}]

    def stop(self) -> None:
        with suppress(*FOREIGN):  # the router drops a replay that no rollout needs
            self._stop()
            for key in self._objects.keys(replay_prefix(self._job.run)):
                self._objects.remove(key)
