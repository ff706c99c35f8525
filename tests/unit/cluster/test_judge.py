"""A rollout judged by the blocks of several gateways, with the real judge and simulated requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from serin.formats.cluster.desired_state import DesiredState
from serin.formats.serving.request import Request
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase
from tests.unit.cluster.conftest import Cluster

QUICK = Plan(
    steps=(50.0, 100.0), step_s=5.0, min_requests=30, quantiles=(0.5,), margin=1.0, bad_margin=3.0,
    warmup_s=0.0, bake_s=5.0, drain_s=5.0, false_promotion=0.2,
)  # fmt: skip


class Requests:
    """Twenty requests a second at each gateway. The candidate fails at the gateways in `failing`."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.sent = failing, 0

    def __call__(self, host: str, state: DesiredState, since: float, until: float) -> Sequence[Request]:
        random = np.random.default_rng(int(until) * 1000 + sum(host.encode()))
        found = []
        for route in state.routes:
            if route.candidate is None or route.stable is None:
                continue
            for t in sorted(since + (until - since) * random.random(int(20 * (until - since)))):
                taken = random.random() < route.candidate_percent / 100
                code = 503 if taken and host in self.failing and random.random() < 0.5 else 200
                us = 2000 * float(np.exp(0.3 * random.standard_normal()))
                self.sent += 1
                found.append(
                    Request(
                        round(t, 6), route.model, route.epoch, "candidate" if taken else "stable",
                        (route.candidate if taken else route.stable).name, code, None, us, None, 1, "-",
                        "HTTP/1.1", f"{host}-{self.sent}",
                    )
                )  # fmt: skip
        return found


def cluster_with(requests: Requests, *hosts: str, controllers: Sequence[str] = ("one",)) -> Cluster:
    cluster = Cluster(judge=None)
    cluster.host(*hosts)
    for agent in cluster.agents.values():
        agent.requests = requests
    cluster.controller(*controllers)
    cluster.command("start", 1, plan=QUICK)
    cluster.until(Phase.PROMOTED)
    cluster.step(2)
    return cluster


def test_a_good_candidate_is_promoted_by_the_evidence_of_three_gateways() -> None:
    cluster = cluster_with(Requests(), "a", "b", "c")
    cluster.command("start", 2, plan=QUICK)
    cluster.until(Phase.PROMOTED)
    last = next(each for each in reversed(cluster.decisions()) if each.evidence.get("hosts"))
    assert sorted(last.evidence["hosts"]) == ["a", "b", "c"]
    cluster.close()


def test_errors_seen_at_one_of_three_gateways_roll_a_version_back() -> None:
    cluster = cluster_with(Requests("b"), "a", "b", "c")
    cluster.command("start", 2, plan=QUICK)
    cluster.until(Phase.ROLLED_BACK)
    turned = next(each for each in cluster.decisions() if each.phase == Phase.ABORTING)
    assert turned.verdict == "fail"
    cluster.close()


def test_a_silent_gateway_holds_the_rollout_until_it_reports_again() -> None:
    cluster = cluster_with(Requests(), "a", "b", "c")
    cluster.command("start", 2, plan=replace(QUICK, step_s=20.0))
    cluster.until(Phase.SHIFTING)
    cluster.step(3)
    cluster.frozen.add("b")
    now = cluster.until(lambda now: now.hold is not None, steps=12)
    assert (now.hold, now.phase) == (Hold.INCIDENT, Phase.SHIFTING)
    assert "gateway b is silent since" in now.reason
    assert "serin hosts forget" in now.reason
    cluster.step(20)
    assert cluster.now().hold is Hold.INCIDENT, "it does not pass by time"
    cluster.frozen.clear()
    cluster.until(Phase.PROMOTED)
    cluster.close()


def test_a_forgotten_gateway_holds_nothing() -> None:
    cluster = cluster_with(Requests(), "a", "b")
    cluster.command("start", 2, plan=QUICK)
    cluster.until(Phase.SHIFTING)
    cluster.frozen.add("b")
    cluster.until(lambda now: now.hold is Hold.INCIDENT)
    cluster.store.remove("cluster/hosts/b/agent.json")
    cluster.until(Phase.PROMOTED)
    cluster.close()


def test_a_bad_candidate_is_rolled_back_although_another_gateway_is_silent() -> None:
    cluster = cluster_with(Requests("a"), "a", "b", "c")
    cluster.command("start", 2, plan=replace(QUICK, step_s=1000.0, false_rollback=1e-12))
    cluster.until(Phase.SHIFTING)
    cluster.frozen.add("c")
    cluster.until(lambda now: now.hold is Hold.INCIDENT)
    cluster.until(Phase.ROLLED_BACK)
    cluster.close()


@pytest.mark.parametrize("after", [1, 9])
def test_no_second_is_judged_twice_or_lost_over_a_change_of_the_leader(after: int) -> None:
    """The candidate's requests that were judged, against those that the gateways have sent."""
    cluster = cluster_with(Requests(), "a", "b", controllers=("one", "two"))
    plan = replace(QUICK, step_s=1e6, deadline_s=1e7)
    cluster.command("start", 2, plan=plan)
    cluster.until(Phase.SHIFTING)
    cluster.step(after)
    cluster.frozen.add(cluster.leader.name)
    cluster.step(30)
    last = cluster.leader.led
    assert last is not None
    (now,) = last.controller.rollouts()
    evidence = Evidence.from_json(now.evidence["guards"])
    sent = judged = 0
    for host in "ab":
        seq, _ = now.evidence["hosts"][host]
        for found in last_feed(cluster, host, seq):
            for second, block in found:
                requests = block["candidate"][0] + block["stable"][0]
                sent += requests
                judged += requests if second < evidence.closed else 0
    assert sent > judged > 200
    assert evidence.candidate.requests + evidence.stable.requests == judged
    cluster.close()


def last_feed(cluster: Cluster, host: str, last: int) -> list[list[tuple[int, dict[str, list[int]]]]]:
    from serin.formats.cluster.evidence import HostEvidence, key_of

    found = []
    for seq in range(1, last + 1):
        stored = cluster.store.read(key_of(host, seq))
        assert stored is not None
        entry = HostEvidence.load(stored.content).models.get("flights")
        if entry is not None and entry.rollout == cluster.now().id:
            found.append([(second, dict(block)) for second, block in entry.blocks])
    return found
