"""What a host reports about itself, replaced about each second by its only writer.

    cluster/hosts/<host>/agent.json         of the agent: its gateway and its releases
    cluster/hosts/<host>/worker-<pool>.json of a Prefect worker: its pool, its GPUs and who holds them

A report that does not change for some seconds means that the host is silent; who reads it measures that with their own
clock, by `beat`. A host that is stopped removes its report; that of a lost one stays until somebody forgets the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from serin.machine.typed_json import Document
from serin.store.objects import Objects

PREFIX: Final = "cluster/hosts/"

Report = TypeVar("Report", bound=Document)


def agent_key(host: str) -> str:
    return f"{PREFIX}{host}/agent.json"


def worker_key(host: str, pool: str) -> str:
    return f"{PREFIX}{host}/worker-{pool}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport:
    """One release on one host. `verified`: None while its golden rows are not checked, "" when they are right, else the
    problem. `problem`: why it could not be started."""

    state: Literal["absent", "starting", "ready", "dead"]
    instance: int | None = None
    verified: str | None = None
    problem: str = ""
    active_requests: int = 0  # at this host's gateway


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport(Document, form="serin.host_report", omit=("events",)):
    """`desired_seq`: the desired state that this host's gateway has in force. `peer`: host:port at which other gateways
    reach this host's releases; None where releases run elsewhere. `problem`: why the gateway rejected its routes.
    `arriving_requests`: those that its gateway is still receiving and may have routed before its routes changed.
    `events`: where this host keeps events of online windows for all hosts; None: nowhere."""

    host: str
    beat: int
    t: float
    address: str  # host:port of the gateway, for clients
    peer: str | None
    desired_seq: int
    evidence_seq: int  # the newest block of evidence that was uploaded (evidence.py)
    releases: Mapping[str, ReleaseReport] = field(default_factory=dict)
    problem: str = ""
    arriving_requests: int = 0
    events: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport(Document, form="serin.host_report"):
    """`gpus`: as `serin gpus --json` shows those of one host. `runs`: flow runs in this worker."""

    host: str
    pool: str
    beat: int
    t: float
    cores: int
    memory_bytes: int
    gpus: tuple[Mapping[str, Any], ...] = ()
    runs: tuple[str, ...] = ()


def read_report(
    kind: type[Report], objects: Objects, key: str, *, within_s: float = math.inf
) -> Report | None:
    """Returns the report under a key; None when there is none, one of another version of Serin, or one that is older
    than `within_s`."""
    stored = objects.read(key)
    try:
        return None if stored is None or stored.age_s > within_s else kind.load(stored.content)
    except ValueError:
        return None
