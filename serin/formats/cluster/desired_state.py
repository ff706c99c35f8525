"""What the leading controller wants of all hosts: which releases run where, and the routes of every gateway.

    cluster/desired/<seq>.json      numbered from 1 without gaps, each written once with a conditional put

Hosts follow the newest. Writing the next number is what makes a controller's decision: of two controllers one succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from serin.store.artifacts import Endpoint, ModelRoute, Release

FORMAT: Final = "serin.desired_state"
VERSION: Final = 1
PREFIX: Final = "cluster/desired/"


def key_of(seq: int) -> str:
    return f"{PREFIX}{seq:012d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceArm:
    """What a gateway needs to cut its requests of one model into blocks (rollout/decide/blocks.py)."""

    rollout: str
    candidate: str
    stable: str
    since_epoch: int  # the first weight epoch that counts
    since_t: float  # seconds since 1970: requests from then on are read
    shares: Mapping[int, float]  # the candidate's share (0 .. 1) by weight epoch
    plan: Mapping[str, Any]  # rollout.decide.plan.Plan.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
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
    arms: Mapping[str, EvidenceArm] = field(
        default_factory=dict
    )  # by model, while a rollout gathers evidence

    def dump(self) -> bytes:
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "seq": self.seq,
                "term": self.term,
                "by": self.by,
                "t": self.t,
                "hosts": {name: list(hosts) for name, hosts in sorted(self.hosts.items())},
                "endpoints": {
                    name: {"http": place.http, "grpc": place.grpc, "elsewhere": place.elsewhere}
                    for name, place in sorted(self.endpoints.items())
                },
                "routes": [_route2json(route) for route in self.routes],
                "timeouts": {model: dict(limits) for model, limits in sorted(self.timeouts.items())},
                "arms": {model: _arm2json(arm) for model, arm in sorted(self.arms.items())},
            }
        ).encode()

    @classmethod
    def load(cls, content: bytes) -> Self:
        """Raises ValueError, TypeError or KeyError for anything else."""
        value = json.loads(content)
        if (value["format"], value["version"]) != (FORMAT, VERSION):
            raise ValueError(f"not a {FORMAT} of version {VERSION}")
        return cls(
            seq=value["seq"],
            term=value["term"],
            by=value["by"],
            t=value["t"],
            hosts={name: tuple(hosts) for name, hosts in value["hosts"].items()},
            endpoints={name: Endpoint(**place) for name, place in value["endpoints"].items()},
            routes=tuple(_json2route(route) for route in value["routes"]),
            timeouts=value["timeouts"],
            arms={model: _json2arm(arm) for model, arm in value["arms"].items()},
        )


def _route2json(route: ModelRoute) -> dict[str, Any]:
    return {
        "model": route.model,
        "epoch": route.epoch,
        "stable": route.stable.name if route.stable else None,
        "candidate": route.candidate.name if route.candidate else None,
        "candidate_percent": route.candidate_percent,
        "baseline": route.baseline.name if route.baseline else None,
        "baseline_percent": route.baseline_percent,
    }


def _json2route(value: Mapping[str, Any]) -> ModelRoute:
    releases = {
        name: Release.parse(value[name]) if value[name] else None
        for name in ("stable", "candidate", "baseline")
    }
    return ModelRoute(
        model=value["model"],
        epoch=value["epoch"],
        candidate_percent=value["candidate_percent"],
        baseline_percent=value["baseline_percent"],
        **releases,
    )


def _arm2json(arm: EvidenceArm) -> dict[str, Any]:
    return {
        "rollout": arm.rollout,
        "candidate": arm.candidate,
        "stable": arm.stable,
        "since_epoch": arm.since_epoch,
        "since_t": arm.since_t,
        "shares": [[epoch, share] for epoch, share in sorted(arm.shares.items())],
        "plan": dict(arm.plan),
    }


def _json2arm(value: Mapping[str, Any]) -> EvidenceArm:
    return EvidenceArm(**{**value, "shares": {int(epoch): share for epoch, share in value["shares"]}})
