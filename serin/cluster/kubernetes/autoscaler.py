"""The HorizontalPodAutoscaler of a release: how many replicas the load needs. Pure.

It follows two metrics of the release's Service: the requests per second that the gateways send to it, and those that
are not answered yet. The first says how many replicas a load needs, the second finds that requests take longer than
those that were measured. Both come from `custom.metrics.k8s.io`, such as prometheus-adapter with
deployments/kubernetes/autoscaling. Not CPU: a replica that scores on a GPU or waits for memory is full long before its
cores are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Final

from serin.cluster.kubernetes.release_objects import (
    AUTOSCALER,
    Object,
    ReleaseTemplate,
    object_name,
    release_object,
)
from serin.errors import BackendRefused
from serin.rollout.decide.state import Phase, Rollout
from serin.serving.triton.repository import Capacity
from serin.spec.serving import ReplicaRange, ServingSpec
from serin.store.artifacts import Release

VERSIONS: Final = ("autoscaling/v2", "autoscaling/v2beta2")
"""The versions of the API that it can be written in, the best first. What is used of them has the same form in both."""

IN_FLIGHT: Final = "serin_requests_in_flight"
PER_SECOND: Final = "serin_requests_per_second"
FLOOR: Final = "serin.dev/floor"  # an annotation: the rollout that minReplicas was raised for

_FULL: Final = 0.7  # the share of a replica's capacity that is aimed at: see `python -m benchmarks elastic`
_TOLERANCE: Final = 0.1  # Kubernetes adds no replica for so much more than the target
_SUFFIXES: Final = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_REQUESTS_PER_INSTANCE: Final = 2  # one that is scored and one that waits, where nothing was measured
_GAINS_TRAFFIC: Final = frozenset(
    {Phase.LOADING, Phase.VERIFYING, Phase.SHADOWING, Phase.SHIFTING, Phase.BAKING, Phase.DRAINING}
)


def build_autoscaler(
    template: ReleaseTemplate,
    release: Release,
    namespace: str,
    serving: ServingSpec,
    capacity: Capacity | None,
    version: str,
) -> Object:
    """Returns the HorizontalPodAutoscaler of a release whose spec has a range of replicas. What else the template says
    about it is kept, such as `behavior`. `capacity`: None where it was not measured.

    Raises BackendRefused for a release whose Service has another name than its cluster at the gateway.
    """
    replicas = serving.replicas
    assert isinstance(replicas, ReplicaRange)
    name = object_name(release)
    if name != release.name:
        raise BackendRefused(
            model=release.name,
            asked=f"serving.replicas: {replicas}",
            reason=f"its name has more than {len(name)} characters, so its Service has another name than its metrics",
            instead="give the model a shorter name, or set a number of replicas",
        )
    made = release_object(template.autoscaler, release, namespace)
    made.update(apiVersion=version, kind=AUTOSCALER)
    made["spec"] = {
        **made.get("spec", {}),
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": replicas.min,
        "maxReplicas": replicas.max,
        "metrics": [_metric(name, metric, wanted) for metric, wanted in targets(serving, capacity).items()],
    }
    return made


def targets(serving: ServingSpec, capacity: Capacity | None) -> dict[str, float]:
    """Returns what the autoscaler aims at, per replica. Without a measurement nobody knows how many requests per second
    a replica answers."""
    if capacity is None:
        scored = serving.instances * serving.gpus * _REQUESTS_PER_INSTANCE
        return {IN_FLIGHT: max(_FULL * scored, 1.0)}
    return {
        PER_SECOND: max(_FULL * capacity.requests_per_s, 0.01),
        IN_FLIGHT: max(_FULL * capacity.in_flight, 1.0),
    }


def _metric(service: str, name: str, wanted: float) -> Object:
    return {
        "type": "Object",
        "object": {
            "describedObject": {"apiVersion": "v1", "kind": "Service", "name": service},
            "metric": {"name": name},
            "target": {"type": "AverageValue", "averageValue": quantity(wanted)},
        },
    }


def quantity(number: float) -> str:
    """Returns a number as the API server writes it, exact to a thousandth: `7`, `2800m`."""
    thousandths = round(number * 1000)
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"


def floor_change(found: Object, rollout: str | None, wanted: int) -> Object | None:
    """Returns the change that makes minReplicas of an autoscaler what a rollout needs; None: it is that already.

    `rollout`: the one that runs; None: minReplicas is again `wanted`, the spec's own. While one runs, minReplicas never
    falls. That it was raised, and for which rollout, is noted in the object itself: another controller continues.
    """
    noted = found["metadata"].get("annotations", {}).get(FLOOR)
    now, most = int(found["spec"].get("minReplicas", 1)), int(found["spec"]["maxReplicas"])
    floor = min(wanted, most)
    if rollout is not None and noted == rollout:
        floor = max(floor, now)
    if (now, noted) == (floor, rollout):
        return None
    metadata = {"resourceVersion": found["metadata"]["resourceVersion"], "annotations": {FLOOR: rollout}}
    return {"metadata": metadata, "spec": {"minReplicas": floor, "metrics": _as_written(found)}}


def _as_written(found: Object) -> list[Object]:
    """Returns the metrics without what API servers that store version v1 add to them when they are read: the value 0
    of a target that is an average. They refuse an object with it."""
    metrics = copy.deepcopy(found["spec"]["metrics"])
    for each in metrics:
        target = each.get("object", {}).get("target", {})
        if target.get("type") == "AverageValue":
            target.pop("value", None)
    return list(metrics)


def load_of(found: Object) -> float:
    """Returns how many replicas the requests of a release need by its autoscaler's last look, beyond its limits too;
    0.0 while it reads no metrics. It does not depend on how many there are, so a floor does not raise itself."""
    status = found.get("status", {})
    now = {
        each["object"]["metric"]["name"]: each["object"]["current"]
        for each in _objects(status, "currentMetrics")
    }
    shares = [
        _number(now[name]["averageValue"]) / _number(each["object"]["target"]["averageValue"])
        for each in _objects(found["spec"], "metrics")
        if "averageValue" in now.get(name := each["object"]["metric"]["name"], {})
    ]
    return max(shares, default=0.0) * int(status.get("currentReplicas", 0))


def replicas_for(load: float) -> int:
    """Returns how many replicas Kubernetes leaves for a load."""
    return math.ceil(round(load / (1 + _TOLERANCE), 3))


def _objects(part: Object, key: str) -> list[Object]:
    return [each for each in part.get(key) or () if each.get("type") == "Object"]


def _number(quantity: str) -> float:
    """Reads a number as the API server writes it."""
    digits = quantity.rstrip("numkMG")
    return float(digits) * _SUFFIXES[quantity.removeprefix(digits)]


def rollout_floors(now: Rollout, running: Mapping[Release, int], load: int = 0) -> dict[Release, int]:
    """Returns the least replicas of the releases of a rollout that runs. `running`: how many each of them has. `load`:
    how many the traffic of all of them needs, at most as many as the stable release may have.

    All traffic may come back to the stable release at any time: it has replicas for it, and keeps what either of both
    has had. The candidate, and a baseline beside it, have the share of that which the next step gives them, so that it
    is there before the traffic is.
    """
    if now.phase.final or now.stable is None:
        return {}
    stable = max(running.get(now.stable, 1), running.get(now.candidate, 1), load)
    floors: dict[Release, int] = {now.stable: stable}
    if now.phase in _GAINS_TRAFFIC:
        steps, step = now.plan.steps, -1 if now.step is None else now.step
        share = steps[min(step + 1, len(steps) - 1)]
        floors[now.candidate] = share_of(stable, share)
        if now.baseline is not None:
            floors[now.baseline] = share_of(stable, min(share, 50.0))
    return floors


def share_of(replicas: int, percent: float) -> int:
    """Returns how many of `replicas` a share of their traffic needs."""
    return max(math.ceil(replicas * percent / 100), 1)
