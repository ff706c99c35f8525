"""Where the number of a release's replicas can follow the load: on Kubernetes, and nowhere else."""

from __future__ import annotations

from typing import Final

from serin.formats.cluster.host_report import PREFIX, AgentReport, read_report
from serin.store.open import open_objects
from serin.store.store import Store

ONE_MACHINE: Final = "one machine runs one replica of a release"
HOSTS_WITH_AGENTS: Final = "hosts with agents run a fixed number of replicas"
_SILENT_S: Final = 120.0  # a report is replaced about each second


def no_autoscaler(place: str) -> str:
    """Returns what to do about a range of replicas in a place."""
    return f"{place}; set a number, or serve on Kubernetes to grow with the load (docs/how-to/autoscale.md)"


def place_without_autoscaler(store: Store) -> str | None:
    """Returns the place that serves the versions of a store, if it has no autoscaler; None: it is Kubernetes, or
    nothing serves them yet."""
    if store.local:
        return ONE_MACHINE
    objects = open_objects(store.url)
    keys = [key for key in objects.keys(PREFIX) if key.endswith("/agent.json")]
    # A host that was lost leaves its report.
    reports = (read_report(AgentReport, objects, key, within_s=_SILENT_S) for key in keys)
    # A gateway alone has no port for peers: its releases run elsewhere.
    return HOSTS_WITH_AGENTS if any(report and report.peer for report in reports) else None
