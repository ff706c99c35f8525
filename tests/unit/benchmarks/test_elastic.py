"""The autoscaling of Kubernetes, by cases of Kubernetes' tests (horizontal_test.go of 1.20.2), and a fleet with it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.elastic.benchmark import OURS, policies
from benchmarks.elastic.day import requests
from benchmarks.elastic.kubernetes_rules import (
    DEFAULT_DOWN,
    DEFAULT_UP,
    Behavior,
    Rules,
    per_pod,
    utilization,
    whole,
)
from benchmarks.elastic.replica import RECORDED
from benchmarks.elastic.simulate import Policy, simulate

Events = list[tuple[float, int]]


def rules(pods: int, percent: int, period_s: float = 60.0) -> Rules:
    named = (("Pods", pods, period_s), ("Percent", percent, period_s))
    return Rules(0.0, tuple(each for each in named if each[1]))


def spread(*changes: int) -> Events:
    """Changes in the middle of equal parts of the last two minutes."""
    part = 120 / len(changes)
    return [(-120 + part * (index + 0.5), change) for index, change in enumerate(changes)]


def test_replicas_by_a_metric_are_those_of_kubernetes() -> None:
    assert per_pod(40.0, 10.0, 3) == 4  # TestScaleUpPerPodCMObject
    assert whole(20.0, 15.0, 3, 3) == 4  # TestScaleUpCMObject
    assert utilization(0.6, 0.3, ready=2, unready=1) == 4  # TestScaleUpUnreadyLessScale
    assert (per_pod(32.9, 10.0, 3), per_pod(33.1, 10.0, 3), per_pod(26.9, 10.0, 3)) == (3, 4, 3)


# From, wanted, least, most, up, down, and what had changed before; then the replicas that TestScalingWithRules expects.
LIMITED: dict[str, tuple[tuple[int, int, int, int], dict[str, Any], int]] = {
    "within range": ((5, 7, 3, 8), {}, 7),
    "the default behavior": ((10, 50, 1, 1000), {}, 20),
    "fewer than the least": ((3, 1, 2, 8), {}, 2),
    "the most": ((100, 1000, 100, 150), {}, 150),
    "pods allow more": ((10, 500, 1, 1000), {"up": rules(100, 100)}, 110),
    "percent allow more": ((10, 500, 1, 1000), {"up": rules(2, 100)}, 20),
    "percent": ((10, 50, 1, 1000), {"up": rules(0, 200)}, 30),
    "pods remove more": ((100, 2, 1, 1000), {"down": rules(20, 1)}, 80),
    "percent remove": ((10, 5, 1, 1000), {"down": rules(0, 50)}, 5),
    "enough came already": ((100, 500, 1, 1000), {"up": rules(5, 0, 120), "added": spread(1, 5, 9)}, 100),
    "some came already": ((100, 500, 1, 1000), {"up": rules(0, 200, 120), "added": spread(1, 5, 9)}, 255),
    "enough went already": ((100, 2, 1, 1000), {"down": rules(5, 0, 120), "removed": spread(1, 5, 9)}, 100),
    "some went already": ((100, 0, 1, 1000), {"down": rules(0, 50, 120), "removed": spread(2, 4, 6)}, 56),
}


@pytest.mark.parametrize("case", LIMITED)
def test_how_fast_replicas_change_is_as_in_kubernetes(case: str) -> None:
    (replicas, wanted, least, most), how, expected = LIMITED[case]
    behavior = Behavior(
        least, most, how.get("up", DEFAULT_UP), how.get("down", Rules(0.0, DEFAULT_DOWN.policies))
    )
    behavior.added, behavior.removed = list(how.get("added", [])), list(how.get("removed", []))
    assert behavior.decide(0.0, replicas, wanted) == expected


def test_replicas_go_when_no_recommendation_of_the_window_wants_them() -> None:
    behavior = Behavior(1, 10)
    assert [behavior.decide(at, 8, wanted) for at, wanted in ((0, 8), (15, 3), (299, 3))] == [8, 8, 8]
    assert behavior.decide(301, 8, 2) == 3


def test_a_fleet_that_follows_its_load_keeps_the_promise_with_fewer_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hours of the day, with the burst in them."""
    monkeypatch.setattr("benchmarks.elastic.simulate.TICKS", 7200)
    replica = RECORDED["64 rows"]
    whole_day = requests(0, 5 * replica.requests_per_s, rise_s=300.0)
    begins = int(np.argmax(np.convolve(whole_day, np.ones(600), "valid"))) - 3300
    hours = whole_day[begins : begins + 7200]
    ours = replace(next(each for each in policies() if each.name == OURS), least=6)
    fixed, scaled = simulate(replica, [Policy("fixed", fixed=25), ours], [hours], start_s=30.0)
    assert fixed.requests == scaled.requests == hours.sum()
    assert fixed.hours == pytest.approx(50.0)
    assert fixed.slow_share < 0.01
    assert scaled.slow_share < 0.01
    assert scaled.replicas[0] < 10 < max(scaled.replicas)
    assert scaled.hours < 0.8 * fixed.hours
