"""What `serin status` shows of several hosts that share a store: who leads, the hosts, the models. Changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from serin.cluster.hosts import Hosts
from serin.formats.cluster.host_report import AgentReport
from serin.formats.cluster.leader import KEY, Leader
from serin.rollout.run.access import Rollouts, find_cluster
from serin.rollout.run.status import ModelStatus, ReleaseStatus, statuses
from serin.store.objects import Objects

_LISTEN_S: Final = 3.0  # a controller and an agent write each second
_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """`leader`: None while no controller leads. `silent`: hosts that wrote nothing while this was read."""

    store: str
    leader: Leader | None
    hosts: Mapping[str, AgentReport] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    models: tuple[ModelStatus, ...] = ()

    @property
    def well(self) -> bool:
        """True when a controller leads, no host is silent or rejects its routes, and what has traffic is ready."""
        problems = self.silent or any(report.problem for report in self.hosts.values())
        serving = [
            (model, entry) for model in self.models for entry in model.releases if entry.weight_percent > 0
        ]
        ready = all(self._ready_at(model, entry) for model, entry in serving)
        return self.leader is not None and bool(self.hosts) and not problems and ready

    def to_json(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "well": self.well,
            "leader": asdict(self.leader) if self.leader else None,
            "agents": [
                {**asdict(report), "silent": host in self.silent} for host, report in self.hosts.items()
            ],
            "models": [
                {
                    "name": model.name,
                    "releases": [
                        {**asdict(entry), "ready_at": self._ready_at(model, entry)}
                        for entry in model.releases
                    ],
                    "rollout": asdict(model.rollout),
                }
                for model in self.models
            ],
        }

    def lines(self) -> Iterator[str]:
        """Yields the status as lines for people."""
        yield f"store    {self.store}"
        if self.leader:
            yield f"leader   {self.leader.holder}  (term {self.leader.term})"
        else:
            yield "leader   NONE: no controller writes; start `serin controller`"
        for host, report in self.hosts.items():
            state = "SILENT" if host in self.silent else "ready"
            problem = f"  {report.problem}" if report.problem else ""
            yield f"  {host:<24} {state:<9} {report.address}{problem}"
        if not self.hosts:
            yield "  no hosts: start `serin agent` on each"
        for model in self.models:
            yield from self._model_lines(model)

    def _model_lines(self, model: ModelStatus) -> Iterator[str]:
        live = model.live_release
        yield f"{model.name}: {f'version {live.label} is live' if live else 'no version is live'}"
        for entry in model.releases:
            at = self._ready_at(model, entry)
            ready = f"ready at {', '.join(at)}" if at else "NOT READY"
            name = model.release_of(entry).name
            yield f"  {name:<24} {entry.arm:<9} {entry.weight_percent:6.2f}%  {ready}"
        if line := model.rollout_line():
            yield line

    def _ready_at(self, model: ModelStatus, entry: ReleaseStatus) -> list[str]:
        name = model.release_of(entry).name
        return [
            host
            for host, report in self.hosts.items()
            if host not in self.silent and name in report.releases and report.releases[name].state == "ready"
        ]


def read_cluster_status(home: Path) -> ClusterStatus | None:
    """Returns the status of the hosts that share the store; None where this machine's stack decides itself."""
    objects = find_cluster(home)
    if objects is None:
        return None
    first, hosts = _leader(objects), Hosts(objects, time.monotonic)
    hosts.refresh()
    before = {host: report.beat for host, report in hosts.reports.items()}
    leader, end = first, time.monotonic() + _LISTEN_S
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        hosts.refresh()
        leader = _leader(objects)
        if leader != first and not _silent(before, hosts.reports):
            break
    return ClusterStatus(
        store=objects.url,
        leader=leader if leader != first and leader and leader.holder else None,
        hosts=dict(sorted(hosts.reports.items())),
        silent=_silent(before, hosts.reports),
        models=tuple(statuses(Rollouts(objects))),
    )


def _leader(objects: Objects) -> Leader | None:
    found = objects.read(KEY)
    return Leader.load(found.content) if found else None


def _silent(before: Mapping[str, int], reports: Mapping[str, AgentReport]) -> frozenset[str]:
    return frozenset(host for host, report in reports.items() if before.get(host) == report.beat)
