"""The autoscaling of Kubernetes, as its controller computes it (pkg/controller/podautoscaler of 1.20.2: horizontal.go,
replica_calculator.go), with the same rounding. Later versions compute the same from these inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

TOLERANCE: Final = 0.1
SYNC_S: Final = 15.0


def per_pod(value: float, target: float, replicas: int) -> int:
    """GetObjectPerPodMetricReplicas: a target of the type AverageValue."""
    if abs(value / (target * replicas) - 1.0) <= TOLERANCE:
        return replicas
    return math.ceil(value / target)


def whole(value: float, target: float, replicas: int, ready: int) -> int:
    """GetObjectMetricReplicas: a target of the type Value."""
    ratio = value / target
    return replicas if abs(1.0 - ratio) <= TOLERANCE else math.ceil(ratio * ready)


def utilization(share: float, target: float, ready: int, unready: int) -> int:
    """GetResourceReplicas: `share` is what the ready pods use of their request on average."""
    replicas, ratio = ready + unready, share / target
    if ready == 0:
        return replicas
    if unready == 0 or ratio <= 1.0:
        return replicas if abs(1.0 - ratio) <= TOLERANCE else math.ceil(ratio * ready)
    again = share * ready / replicas / target  # those that are not ready count as unused
    if abs(1.0 - again) <= TOLERANCE or again < 1.0:
        return replicas
    return max(math.ceil(again * replicas), replicas)


@dataclass(frozen=True)
class Rules:
    """One direction of `behavior`. `policies`: (type, value, periodSeconds)."""

    window_s: float
    policies: tuple[tuple[str, float, float], ...]

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Rules:
        policies = tuple((each["type"], each["value"], each["periodSeconds"]) for each in found["policies"])
        return cls(found["stabilizationWindowSeconds"], policies)


DEFAULT_UP: Final = Rules(0.0, (("Percent", 100, 15.0), ("Pods", 4, 15.0)))
DEFAULT_DOWN: Final = Rules(300.0, (("Percent", 100, 15.0),))


@dataclass
class Behavior:
    """normalizeDesiredReplicasWithBehaviors: what was recommended in the window, and what changed in the periods."""

    least: int
    most: int
    up: Rules = DEFAULT_UP
    down: Rules = DEFAULT_DOWN
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    added: list[tuple[float, int]] = field(default_factory=list)
    removed: list[tuple[float, int]] = field(default_factory=list)

    def decide(self, now: float, replicas: int, wanted: int) -> int:
        """Returns the replicas to have from `now` on."""
        if replicas > self.most:
            return self.most
        if replicas < self.least:
            return self.least
        decided = self._limited(now, replicas, self._stabilized(now, replicas, wanted))
        if decided > replicas:
            self.added.append((now, decided - replicas))
        elif decided < replicas:
            self.removed.append((now, replicas - decided))
        return decided

    def _stabilized(self, now: float, replicas: int, wanted: int) -> int:
        grows = wanted >= replicas
        window_s, better = (self.up.window_s, min) if grows else (self.down.window_s, max)
        kept_s = max(self.up.window_s, self.down.window_s)
        self._recommended = [each for each in self._recommended if each[0] > now - kept_s]
        found = wanted
        for at, earlier in self._recommended:
            if at > now - window_s:
                found = better(found, earlier)
        self._recommended.append((now, wanted))
        return found

    def _limited(self, now: float, replicas: int, wanted: int) -> int:
        if wanted > replicas:
            limits = [
                math.ceil(begun * (1 + value / 100)) if kind == "Percent" else begun + int(value)
                for kind, value, period_s in self.up.policies
                for begun in (replicas - _changed(self.added, now, period_s),)
            ]
            return min(wanted, self.most, max(*limits, replicas))
        if wanted < replicas:
            limits = [
                int(begun * (1 - value / 100)) if kind == "Percent" else begun - int(value)
                for kind, value, period_s in self.down.policies
                for begun in (replicas + _changed(self.removed, now, period_s),)
            ]
            return max(wanted, self.least, min(*limits, replicas))
        return wanted


def _changed(events: Sequence[tuple[float, int]], now: float, period_s: float) -> int:
    return sum(count for at, count in events if at > now - period_s)
