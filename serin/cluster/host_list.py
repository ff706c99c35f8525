"""The hosts that share a store, as they report themselves (formats/cluster/host_report.py); and how one is forgotten.

A host counts as silent when its newest report is older than SILENT_S by this machine's clock. That is for people to
read; nothing is decided by it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

from serin.errors import NotFound, StoreError
from serin.formats.cluster.host_report import PREFIX, AgentReport, WorkerReport
from serin.store.objects import Objects
from serin.store.stage_results import shared_objects

logger = logging.getLogger(__name__)

SILENT_S: Final = 15.0
_EVIDENCE: Final = "cluster/evidence/"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEntry:
    """`age_s`: of its newest report. `agent`: None where no gateway of this host reports."""

    host: str
    age_s: float
    workers: tuple[WorkerReport, ...] = ()
    agent: AgentReport | None = None

    @property
    def silent(self) -> bool:
        return self.age_s > SILENT_S

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """Each GPU once: a host may have several workers."""
        return list({gpu["id"]: dict(gpu) for worker in self.workers for gpu in worker.gpus}.values())

    def __str__(self) -> str:
        roles = [f"worker {worker.pool} ({len(worker.runs)} running)" for worker in self.workers]
        if self.agent is not None:
            ready = sum(release.state == "ready" for release in self.agent.releases.values())
            roles.append(
                f"gateway {self.agent.address} ({ready} of {len(self.agent.releases)} releases ready)"
            )
        seen = f"SILENT for {self.age_s:,.0f} s" if self.silent else f"seen {max(self.age_s, 0):.0f} s ago"
        return f"{self.host}: {', '.join(roles)}; {len(self.gpus)} GPUs; {seen}"

    def to_json(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "age_s": round(self.age_s, 1),
            "silent": self.silent,
            "workers": [asdict(worker) for worker in self.workers],
            "agent": None if self.agent is None else asdict(self.agent),
            "gpus": self.gpus,
        }


def read_hosts() -> list[HostEntry]:
    """Every host that has reported to the store that SERIN_STORE names, by name; none without such a store."""
    objects = shared_objects()
    return [] if objects is None else _read(objects)


def read_hosts_if_reachable() -> list[HostEntry]:
    """The same for commands that show more than hosts: none, and a warning, when the store does not answer."""
    try:
        return read_hosts()
    except StoreError as error:
        logger.warning("hosts are not shown: %s", error)
        return []


def forget_host(host: str) -> None:
    """Removes what a host has reported; the rest delete rows of its records when that is asked. One that still runs
    reports again within seconds. NotFound: an unknown one."""
    from serin.formats.shared_captures import GONE  # with Arrow
    from serin.watcher.cluster_state import HOSTS

    objects = shared_objects()
    known = {entry.host for entry in _read(objects)} | _recording_hosts() if objects is not None else set()
    if objects is None or host not in known:
        raise NotFound(kind="host", name=host, known=sorted(known))
    objects.put(f"{GONE}{host}.json", b"{}")
    for prefix in (f"{PREFIX}{host}/", f"{_EVIDENCE}{host}/", f"{HOSTS}{host}/alerts.json"):
        for key in objects.keys(prefix):
            objects.remove(key)


def _recording_hosts() -> set[str]:
    """The hosts that have uploaded recorded requests."""
    from serin.formats.shared_captures import RECORDS
    from serin.store.store import Store

    files = Store.open().shared_files()
    return {host for model in files.names(RECORDS) for host in files.names(f"{RECORDS}{model}/")}


def _read(objects: Objects) -> list[HostEntry]:
    reports: dict[str, list[AgentReport | WorkerReport]] = {}
    for key in objects.keys(PREFIX):
        host, _, name = key.removeprefix(PREFIX).partition("/")
        kind = AgentReport if name == "agent.json" else WorkerReport if name.startswith("worker-") else None
        stored = objects.read(key)
        if kind is not None and stored is not None:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # of another version of Serin
                reports.setdefault(host, []).append(kind.load(stored.content))
    return [
        HostEntry(
            host=host,
            age_s=time.time() - max(report.t for report in of_host),
            workers=tuple(report for report in of_host if isinstance(report, WorkerReport)),
            agent=next((report for report in of_host if isinstance(report, AgentReport)), None),
        )
        for host, of_host in sorted(reports.items())
        if of_host
    ]
