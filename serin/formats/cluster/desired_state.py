"""What the leading controller wants of all hosts: which releases run where, and the routes of every gateway.

    cluster/desired/<seq>.json      numbered from 1 without gaps, each written once with a conditional put

Hosts follow the newest. Writing the next number is what makes a controller's decision: of two controllers one succeeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from serin.machine.typed_json import Document
from serin.store.artifacts import Endpoint, ModelRoute

PREFIX: Final = "cluster/desired/"


def key_of(seq: int) -> str:
    return f"{PREFIX}{seq:012d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceArm:
    """What a gateway needs to cut its requests of one model into blocks (rollout/decide/blocks.py). `resume`: by host,
    the last object that was counted when this arm was written, and its course: an agent that knows nothing of the
    rollout continues there."""

    rollout: str
    candidate: str
    stable: str
    since_epoch: int  # the first weight epoch that counts
    since_t: float  # seconds since 1970: requests from then on are read
    shares: Mapping[int, float]  # the candidate's share (0 .. 1) by weight epoch
    plan: Mapping[str, Any]  # rollout.decide.plan.Plan.to_json()
    resume: Mapping[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """Recorded requests of `live` that hosts send to `candidate`. `run` names it. `address`: where the candidate
    answers HTTP; None: the hosts run it. `places`: by host that takes part, where it continues in its records."""

    run: str
    live: str
    candidate: str
    address: str | None
    timeout_s: float
    max_batch_rows: int
    share: float
    rows: int
    places: Mapping[str, Mapping[str, Any]]


def replay_prefix(run: str) -> str:
    """Returns where hosts write what a replay reports: a folder for each."""
    return f"cluster/replays/{run}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState(Document, form="serin.desired_state"):
    """`hosts`: by release name, the hosts that run it. `endpoints`: addresses of releases that no host runs (Kubernetes
    services, servers elsewhere). `timeouts`: by model, serving.envoy.routes.Timeouts as JSON."""

    seq: int
    term: int
    by: str
    t: float
    hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    routes: tuple[ModelRoute, ...] = ()
    timeouts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # by model, while a rollout gathers evidence
    arms: Mapping[str, EvidenceArm] = field(default_factory=dict)
    replays: Mapping[str, ReplayJob] = field(
        default_factory=dict
    )  # by model, while recorded requests are sent
