"""A day of a fleet, a second at a time. All runs of a benchmark step together: their states are arrays.

A replica answers requests at the rate that was measured for as many as it has at the same time. What comes beyond the
best rate waits, for all replicas in one line, and fails when it has waited for as long as a request may take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from benchmarks.elastic.day import TICK_S, TICKS
from benchmarks.elastic.kubernetes_rules import (
    DEFAULT_DOWN,
    DEFAULT_UP,
    SYNC_S,
    Behavior,
    Rules,
    per_pod,
    utilization,
    whole,
)
from benchmarks.elastic.replica import Replica

Array = np.ndarray[Any, Any]

SCRAPE_S: Final = 5.0  # deployments/kubernetes/autoscaling/prometheus.yml: what is read is that old
IN_FLIGHT_S, RATE_S, QUEUE_S, CPU_S = 20.0, 20.0, 30.0, 15.0  # windows: rules.yml, and metrics-server's
LEAVES_S: Final = 13.0  # a replica that leaves has its cores for so long: preStop, then Triton's exit
_PER_SCRAPE: Final = int(SCRAPE_S / TICK_S)
_PER_SYNC: Final = int(SYNC_S / TICK_S)


@dataclass(frozen=True)
class Policy:
    """How many replicas there are. `fixed`: always so many; None: by the metrics that have a target. `in_flight` and
    `rate` are targets per replica, as shares of the capacity; `queue`: of the promised latency; `cpu`: of the cores."""

    name: str
    fixed: int | None = None
    in_flight: float | None = None
    queue: float | None = None
    rate: float | None = None
    cpu: float | None = None
    least: int = 2
    most: int = 60
    up: Rules = DEFAULT_UP
    down: Rules = DEFAULT_DOWN


@dataclass
class Run:
    """One fleet on one day. `starting`: when the replicas that start will be ready."""

    policy: Policy
    day: int
    behavior: Behavior = field(init=False)
    starting: list[float] = field(default_factory=list)
    draw: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.day)
        self.behavior = Behavior(self.policy.least, self.policy.most, self.policy.up, self.policy.down)


@dataclass(frozen=True)
class Outcome:
    """`replicas`: at the end of each minute. `hours`: of all replicas, from their creation to their end."""

    policy: str
    day: int
    hours: float
    requests: float
    slow: float
    failed: float
    most: int
    replicas: Sequence[int]

    @property
    def slow_share(self) -> float:
        """What failed is slow, too."""
        return (self.slow + self.failed) / self.requests


class Counters:
    """What Prometheus has scraped: one row per scrape, the newest last."""

    def __init__(self, runs: int) -> None:
        kept = int(max(IN_FLIGHT_S, RATE_S, QUEUE_S, CPU_S) / SCRAPE_S) + 2
        self._rows: deque[dict[str, Array]] = deque(maxlen=kept)
        self._runs = runs

    def scrape(self, **values: Array) -> None:
        self._rows.append({name: value.copy() for name, value in values.items()})

    def average(self, name: str, window_s: float) -> Array:
        """The mean over a window that ended one scrape ago."""
        count = int(window_s / SCRAPE_S)
        rows = list(self._rows)[-1 - count : -1]
        return np.mean([row[name] for row in rows], axis=0) if rows else np.zeros(self._runs)

    def increase(self, name: str, window_s: float) -> Array:
        rows = list(self._rows)[:-1][-1 - int(window_s / SCRAPE_S) :]
        return rows[-1][name] - rows[0][name] if len(rows) > 1 else np.zeros(self._runs)


def simulate(
    replica: Replica, policies: Sequence[Policy], days: Sequence[Array], *, start_s: float
) -> list[Outcome]:
    """`days`: the requests of each tick. `start_s`: from the creation of a replica until it gets traffic."""
    return _Fleets(replica, policies, days, start_s).run()


class _Fleets:
    def __init__(
        self, replica: Replica, policies: Sequence[Policy], days: Sequence[Array], start_s: float
    ) -> None:
        self._replica, self._days, self._start_s = replica, np.array(days), start_s
        self.runs = [Run(policy, day) for day in range(len(days)) for policy in policies]
        count = len(self.runs)
        self._which = np.array([run.day for run in self.runs])
        self._ready = np.array([run.policy.fixed or run.policy.least for run in self.runs], dtype=float)
        self._owned_s, self._waiting, self._slow, self._failed = np.zeros((4, count))
        self._asked, self._answered, self._waited_ms, self._used = np.zeros((4, count))
        self._in_flight = np.zeros(count)
        self._wanted = self._ready.copy()
        self._next_start = np.full(count, np.inf)
        self._counters = Counters(count)
        self._history: list[Array] = []

    def run(self) -> list[Outcome]:
        scaled = [index for index, run in enumerate(self.runs) if run.policy.fixed is None]
        for tick in range(TICKS):
            now = tick * TICK_S
            self._begin(now)
            self._answer(self._days[self._which, tick])
            if tick % _PER_SCRAPE == 0:
                self._counters.scrape(
                    in_flight=self._in_flight, asked=self._asked, answered=self._answered,
                    waited_ms=self._waited_ms, used=self._used,
                )  # fmt: skip
            if tick % _PER_SYNC == 0 and tick:
                self._scale(now, scaled)
            if tick % int(60 / TICK_S) == 0:
                self._history.append(self._wanted.copy())
        history = np.array(self._history).astype(int)
        totals = self._days.sum(axis=1)
        return [
            Outcome(
                policy=run.policy.name, day=run.day, hours=float(self._owned_s[index]) / 3600,
                requests=float(totals[run.day]), slow=float(self._slow[index]), failed=float(self._failed[index]),
                most=int(history[:, index].max()), replicas=history[:, index].tolist(),
            )
            for index, run in enumerate(self.runs)
        ]  # fmt: skip

    def _begin(self, now: float) -> None:
        """Gives traffic to the replicas that have become ready."""
        for index in np.flatnonzero(self._next_start <= now):
            starting = self.runs[index].starting
            self._ready[index] += sum(at <= now for at in starting)
            starting[:] = [at for at in starting if at > now]
            self._next_start[index] = min(starting, default=np.inf)

    def _answer(self, asked: Array) -> None:
        replica, most = self._replica, self._ready * self._replica.most_per_s * TICK_S
        due = self._waiting + asked
        answered = np.minimum(due, most)
        before, self._waiting = self._waiting, due - answered
        gone = np.maximum(self._waiting - most / TICK_S * replica.timeout_s, 0.0)
        self._waiting -= gone
        rate = answered / self._ready / TICK_S
        waited_ms = (before + self._waiting) / 2 / most * TICK_S * 1000
        self._slow += (asked - gone).clip(0.0) * replica.slow_share(rate, waited_ms)
        self._failed += gone
        self._in_flight = self._ready * replica.in_flight_at(rate) + self._waiting
        self._asked += asked
        self._answered += answered
        self._waited_ms += answered * (replica.queue_ms_at(rate) + waited_ms)
        self._used += rate / replica.most_per_s * TICK_S
        self._owned_s += self._wanted * TICK_S

    def _scale(self, now: float, scaled: Sequence[int]) -> None:
        counters = self._counters
        in_flight = counters.average("in_flight", IN_FLIGHT_S)
        rate = counters.increase("asked", RATE_S) / RATE_S
        answered = counters.increase("answered", QUEUE_S)
        queue_ms = counters.increase("waited_ms", QUEUE_S) / np.maximum(answered, 0.001 * QUEUE_S)
        cpu = counters.increase("used", CPU_S) / CPU_S
        for index in scaled:
            run, replicas = self.runs[index], int(self._wanted[index])
            policy, ready = run.policy, int(self._ready[index])
            wanted = [1]
            if policy.in_flight is not None:
                target = max(policy.in_flight * self._replica.in_flight, 1.0)
                wanted.append(per_pod(float(in_flight[index]), target, replicas))
            if policy.rate is not None:
                target = policy.rate * self._replica.requests_per_s
                wanted.append(per_pod(float(rate[index]), target, replicas))
            if policy.queue is not None:
                target = policy.queue * self._replica.limit_ms
                wanted.append(whole(float(queue_ms[index]), target, replicas, ready))
            if policy.cpu is not None:
                wanted.append(utilization(float(cpu[index]), policy.cpu, ready, replicas - ready))
            decided = run.behavior.decide(now, replicas, max(wanted))
            if decided != replicas:
                self._resize(index, now, decided)

    def _resize(self, index: int, now: float, wanted: int) -> None:
        """Starts replicas, or ends some: those that are not ready yet are the first to go."""
        run, more = self.runs[index], wanted - int(self._wanted[index])
        if more > 0:
            run.starting += (now + self._start_s * run.draw.uniform(0.8, 1.2, more)).tolist()
        else:
            unready = min(len(run.starting), -more)
            run.starting = sorted(run.starting)[: len(run.starting) - unready]
            leaving = -more - unready
            self._ready[index] -= leaving
            self._owned_s[index] += leaving * LEAVES_S
        self._next_start[index] = min(run.starting, default=np.inf)
        self._wanted[index] = wanted
