"""Simulates a day with a burst of five times the traffic: a fleet that is scaled as release.yaml says, one of a fixed
size that keeps the same promise, and two that follow the CPU."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from benchmarks.elastic.day import requests
from benchmarks.elastic.kubernetes_rules import DEFAULT_UP, Rules
from benchmarks.elastic.picture import draw
from benchmarks.elastic.replica import RECORDED
from benchmarks.elastic.simulate import Outcome, Policy, simulate
from benchmarks.machine import machine
from benchmarks.report import Report
from serin.cluster.kubernetes.autoscaler import IN_FLIGHT, PER_SECOND, targets
from serin.serving.triton.repository import Capacity
from serin.spec.serving import ServingSpec

TEMPLATE: Final = Path(__file__).parents[2] / "deployments" / "kubernetes" / "base" / "release.yaml"
START_S: Final = 30.0
WAITS_S: Final = RECORDED["64 rows"].timeout_s
RISES_S: Final = {"in five minutes": 300.0, "in one minute": 60.0}
USUAL, SUDDEN = RISES_S
BUSY_REPLICAS: Final = 5  # of a fixed fleet, at the busiest time without the burst
PROMISED: Final = 0.01  # of a day's requests may be slow
QUICK_DAYS, FULL_DAYS = 5, 12
OURS: Final = "serin"


@dataclass(frozen=True)
class Case:
    """`start_s`: until a new replica gets traffic."""

    kind: str
    rise: str
    start_s: float
    days: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.rise}, replicas start in {self.start_s:.0f} s"


def measure(*, full: bool, say: Callable[[str], None]) -> Report:
    days = FULL_DAYS if full else QUICK_DAYS
    wanted = [Case("64 rows", rise, START_S, days) for rise in RISES_S]
    if full:
        wanted += [Case("64 rows", rise, 3 * START_S, days) for rise in RISES_S]
        wanted += [Case(kind, USUAL, START_S, days) for kind in RECORDED if kind != "64 rows"]
    found = run(wanted, say)
    usual, sudden = found[str(wanted[0])], found[str(wanted[1])]
    if path := os.environ.get("SERIN_ELASTIC_PICTURE"):
        draw(load_of(wanted[0], day=0), usual, Path(path))
    return Report(
        benchmark="elastic",
        mode="full" if full else "quick",
        environment={"machine": machine(), "versions": {"numpy": np.__version__}, "days": days},
        cases={},
        line={
            "replica_hours": _over_fixed(usual, "hours"),
            "slow_over_fixed": _over_fixed(usual, "slow"),
            "slow_share": usual[OURS]["slow"],
            "errors": usual[OURS]["failed"],
            "sudden_hours": _over_fixed(sudden, "hours"),
            "sudden_slow_share": sudden[OURS]["slow"],
            "sudden_errors": sudden[OURS]["failed"],
        },
        notes=[
            f"{days} days; a slow request takes longer than promised, or fails after {WAITS_S:g} s",
            f"fixed: the smallest fleet with at most {PROMISED:.0%} of slow requests on each day, known in advance",
            "in flight: 0.7 of the requests at the same time that a replica can have; queue: a quarter of the promise",
            "cpu: Kubernetes' default behavior; all cores are busy at the best rate",
        ],
        tables=[_table(case, outcomes) for case, outcomes in found.items()],
        figures=found,
    )


def _over_fixed(found: Mapping[str, Any], figure: str) -> float:
    ours, fixed = found[OURS][figure], found["fixed"][figure]
    return float(ours / fixed) if fixed else math.inf if ours else 1.0


def policies() -> list[Policy]:
    """Returns what is compared with the fixed fleet. Ours is what the autoscaler of a release is given."""
    with TEMPLATE.open(encoding="utf-8") as file:
        scaler = next(each for each in yaml.safe_load_all(file) if each["kind"] == "HorizontalPodAutoscaler")
    behavior = scaler["spec"]["behavior"]
    up, down = Rules.read(behavior["scaleUp"]), Rules.read(behavior["scaleDown"])
    whole = 1_000_000  # to see the shares of the capacity that are aimed at
    aims = targets(ServingSpec(), Capacity(in_flight=whole, requests_per_s=whole))
    ours = Policy(OURS, in_flight=aims[IN_FLIGHT] / whole, rate=aims[PER_SECOND] / whole, up=up, down=down)
    return [
        ours,
        replace(ours, name="twice as many in 15 s", up=DEFAULT_UP),
        replace(ours, name="requests/s alone", in_flight=None),
        replace(ours, name="in flight alone", rate=None),
        replace(ours, name="in flight and queue", rate=None, queue=0.25),
        Policy("cpu 80%", cpu=0.8),
        Policy("cpu 50%", cpu=0.5),
    ]


def run(wanted: Sequence[Case], say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with multiprocessing.Pool(min(len(wanted), os.cpu_count() or 1)) as pool:
        for case, outcomes in pool.imap(_simulated, wanted):
            found[str(case)] = outcomes
            say(str(case))
    return found


def load_of(case: Case, day: int) -> Any:
    replica = RECORDED[case.kind]
    return requests(day, BUSY_REPLICAS * replica.requests_per_s, rise_s=RISES_S[case.rise])


def _simulated(case: Case) -> tuple[Case, dict[str, Any]]:
    replica, days = RECORDED[case.kind], [load_of(case, day) for day in range(case.days)]
    scaled = policies()
    needed = math.ceil(max(_busiest(day) for day in days) / replica.most_per_s)
    fixed = [Policy(f"fixed {count}", fixed=count) for count in range(needed - 2, needed + 3)]
    outcomes = simulate(replica, [*fixed, *scaled], days, start_s=case.start_s)
    by_policy = {each.name: [o for o in outcomes if o.policy == each.name] for each in (*fixed, *scaled)}
    kept = next(each.name for each in fixed if max(o.slow_share for o in by_policy[each.name]) <= PROMISED)
    found = {"fixed": by_policy[kept], **{each.name: by_policy[each.name] for each in scaled}}
    return case, {name: _summary(days_of) for name, days_of in found.items()}


def _busiest(day: Any) -> float:
    """The requests per second of the busiest ten seconds."""
    return float(np.convolve(day, np.ones(10) / 10, "valid").max())


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    asked = sum(each.requests for each in outcomes)
    return {
        "hours": sum(each.hours for each in outcomes) / len(outcomes),
        "slow": sum(each.slow + each.failed for each in outcomes) / asked,
        "worst_day": max(each.slow_share for each in outcomes),
        "failed": sum(each.failed for each in outcomes) / asked,
        "most": max(each.most for each in outcomes),
        "replicas": outcomes[0].replicas,
    }


def _table(case: str, found: Mapping[str, Any]) -> str:
    head = f"  {'':<22}{'replica hours':>15}{'/ fixed':>10}{'slow':>10}{'worst day':>12}{'failed':>10}{'most':>7}"
    rows = [
        f"  {name:<22}{each['hours']:>15.0f}{each['hours'] / found['fixed']['hours']:>10.2f}{each['slow']:>10.3%}"
        f"{each['worst_day']:>12.3%}{each['failed']:>10.3%}{each['most']:>7}"
        for name, each in found.items()
    ]
    return "\n".join([f"elastic: {case}", head, *rows, ""])
