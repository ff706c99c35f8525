"""What the agents of other hosts report, and which of them can be asked for a release. Pure but for the clock it is
given.

A peer counts as silent when its beat does not change, by this host's own clock, and only while this host can read
reports: if the store is gone, the peers are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from serin.formats.cluster.desired_state import DesiredState
from serin.formats.cluster.host_report import AgentReport

SILENT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    report: AgentReport
    changed_at: float
    read_at: float


class PeerBook:
    def __init__(self, host: str) -> None:
        self._host = host
        self._entries: dict[str, _Entry] = {}

    def dump(self) -> bytes:
        """Returns the reports, for a process that begins while they cannot be read."""
        return json.dumps(
            {host: entry.report.dump().decode() for host, entry in self._entries.items()}
        ).encode()

    def restore(self, content: bytes, t: float) -> None:
        """Takes the reports of `dump` as read at `t`. Raises ValueError, TypeError or KeyError for anything else."""
        for host, report in json.loads(content).items():
            self.note(host, AgentReport.load(report.encode()), t)

    def hosts(self, desired: DesiredState) -> list[str]:
        """Returns the other hosts that run something, in the order in which they should be read."""
        named = {host for hosts in desired.hosts.values() for host in hosts} - {self._host}
        for gone in {*self._entries} - named:
            del self._entries[gone]
        return sorted(named, key=lambda host: (self._read_at(host), host))

    def _read_at(self, host: str) -> float:
        return self._entries[host].read_at if host in self._entries else float("-inf")

    def note(self, host: str, report: AgentReport | None, t: float) -> None:
        """Records a report as it was read at `t`; None: the host has none (it was forgotten)."""
        if report is None:
            self._entries.pop(host, None)
            return
        before = self._entries.get(host)
        same = before is not None and before.report.beat == report.beat
        changed_at = before.changed_at if before is not None and same else t
        self._entries[host] = _Entry(report=report, changed_at=changed_at, read_at=t)

    def known(self, desired: DesiredState) -> dict[str, tuple[str, ...]]:
        """Returns by release the peers that should have it, whatever they report: what is left when none is ready."""
        return {
            name: tuple(
                sorted(
                    entry.report.peer
                    for host, entry in self._entries.items()
                    if host in hosts and entry.report.peer
                )
            )
            for name, hosts in desired.hosts.items()
        }

    def ready(self, releases: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Returns by release the peers on which it is ready and its golden rows are not wrong.

        Silent ones are left out where others have the release: they may be gone, or only cut off from the store.
        """
        found = {}
        for name in releases:
            having = [entry for entry in self._entries.values() if entry.report.peer and _has(entry, name)]
            heard = [entry for entry in having if entry.read_at - entry.changed_at <= SILENT_S]
            found[name] = tuple(sorted(str(entry.report.peer) for entry in heard or having))
        return found


def _has(entry: _Entry, name: str) -> bool:
    release = entry.report.releases.get(name)
    return release is not None and release.state == "ready" and not release.verified
