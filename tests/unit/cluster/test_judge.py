"""A rollout judged by the blocks of several gateways, which are the evidence of one that saw all requests."""

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.formats.cluster.desired_state import DesiredState
from serin.formats.serving.request import Request
from serin.rollout.decide.blocks import Block
from serin.rollout.decide.cutting import Arm, Cut, Mark, complete_at, cut_requests
from serin.rollout.decide.evidence import Evidence, fold, fold_blocks
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Hold, Phase
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic
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
                        (route.candidate if taken else route.stable).name, code, None, us, 1, "-",
                        f"{host}-{self.sent}",
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
    assert "serin hosts remove" in now.reason
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
    (now,) = last._controller.rollouts()
    evidence = Evidence.from_json(now.evidence["guards"])
    sent = judged = 0
    for host in "ab":
        seq, *_ = now.evidence["hosts"][host]
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
        entry = HostEvidence.load(stored.content).models.get("flights")
        if entry is not None and entry.rollout == cluster.now().id:
            found.append([(second, dict(block)) for second, block in entry.blocks])
    return found


T = 1000.0
PLAN = Plan(slo_ms=100.0, warmup_s=2.0)
ARM = Arm(candidate=CANDIDATE, stable=STABLE, epoch=3, share=0.3, since=3)
END = T + 60.0


def as_json(evidence: Evidence) -> str:
    return json.dumps(evidence.to_json())


def traffic(seed: int) -> list[Request]:
    """Requests of the rollout, after some of the weight epoch before it."""
    before = Traffic(requests_per_s=10, share=0.0, epoch=2).requests(T - 5, 5, seed)
    during = Traffic(requests_per_s=25, share=0.3, slower=4.0, errors=(0.02, 0.2)).requests(T, 10, seed)
    return before + during


def at_once(requests: list[Request]) -> Evidence:
    return fold(Evidence(), requests, arm=ARM, plan=PLAN, now=END)


def folded(evidence: Evidence, cut: Cut, mark: Mark, *, complete_to: int) -> Evidence:
    blocks, newest = cut.blocks.items(), mark.newest
    return fold_blocks(
        evidence, blocks, arm=ARM, plan=PLAN, newest=newest, complete_to=complete_to, before=cut.before
    )


class Gateway:
    """Cuts its lines in reads of any size, as an agent does each second."""

    def __init__(self, lines: list[Request]) -> None:
        self.lines, self.mark = lines, Mark()

    def read(self, count: int) -> tuple[Cut, Mark]:
        taken, self.lines = self.lines[:count], self.lines[count:]
        now = END if not self.lines else None
        self.mark, cut = cut_requests(self.mark, taken, arm=ARM, shares={2: 0.0, 3: 0.3}, plan=PLAN, now=now)
        return cut, self.mark


@settings(max_examples=12, deadline=None)
@given(gateways=st.integers(1, 4), seed=st.integers(0, 10_000), reads=st.integers(4, 80))
def test_any_interleaving_of_gateways_gives_the_evidence_of_one(gateways: int, seed: int, reads: int) -> None:
    random = np.random.default_rng(seed)
    requests = traffic(seed)
    at = random.integers(0, gateways, len(requests))
    places = [
        Gateway([each for each, where in zip(requests, at, strict=True) if where == g])
        for g in range(gateways)
    ]
    evidence = Evidence()
    # Latencies from before the rollout count before its first second is judged, as in one gateway's log.
    first = [gateway.read(sum(line.epoch == 2 for line in gateway.lines)) for gateway in places]
    for cut, mark in first:
        evidence = folded(evidence, cut, mark, complete_to=0)
    while any(gateway.lines for gateway in places) or any(
        gateway.mark.complete_to < complete_at(END, PLAN) for gateway in places
    ):
        gateway = places[random.integers(0, gateways)]
        cut, mark = gateway.read(int(random.integers(1, reads + 1)))
        complete_to = min(each.mark.complete_to for each in places)
        evidence = folded(evidence, cut, mark, complete_to=complete_to)
        evidence = Evidence.from_json(json.loads(as_json(evidence)))  # through the journal
    assert as_json(evidence) == as_json(at_once(requests))
    assert evidence.blocks >= 8


def test_a_difference_is_computed_from_the_sum_and_not_at_each_gateway() -> None:
    """Errors of the candidate at one gateway of three, in each second."""
    requests = Traffic(requests_per_s=60, share=0.5, errors=(0.0, 0.3)).requests(T, 10)
    marked = [replace_request(line, index) for index, line in enumerate(requests)]
    alone = at_once(marked)
    parts: list[tuple[int, Block]] = []
    newest = 0.0
    for gateway in range(3):
        lines = [line for index, line in enumerate(marked) if index % 3 == gateway]
        mark, cut = cut_requests(Mark(), lines, arm=ARM, shares={3: 0.3}, plan=PLAN, now=END)
        newest = max(newest, mark.newest)
        parts += cut.blocks.items()
    together = fold_blocks(
        Evidence(), parts, arm=ARM, plan=PLAN, newest=newest, complete_to=complete_at(END, PLAN)
    )
    assert as_json(together) == as_json(alone)


def replace_request(line: Request, index: int) -> Request:
    return line if index % 3 == 0 else line._replace(code=200)


def test_a_block_that_comes_late_counts_in_the_first_open_second() -> None:
    _, cut = cut_requests(Mark(), traffic(1), arm=ARM, shares={3: 0.3}, plan=PLAN, now=END)
    early, late = min(cut.blocks), max(cut.blocks)
    evidence = fold_blocks(
        Evidence(), [(late, cut.blocks[late])], arm=ARM, plan=PLAN, newest=END, complete_to=late + 1
    )
    evidence = fold_blocks(
        evidence, [(early, cut.blocks[early])], arm=ARM, plan=PLAN, newest=END, complete_to=late + 1
    )
    assert list(evidence.open) == [late + 1]
    assert evidence.blocks == 1


@pytest.mark.parametrize("behind", [0.5, 1.5])
def test_a_gateway_sends_a_line_that_is_late_by_its_own_watermark_only(behind: float) -> None:
    lines = traffic(2)
    newest = max(line.t for line in lines)
    mark, _ = cut_requests(Mark(), lines, arm=ARM, shares={3: 0.3}, plan=PLAN)
    straggler = replace_arrival(lines[-1], newest - behind)
    _, cut = cut_requests(mark, [straggler], arm=ARM, shares={3: 0.3}, plan=PLAN)
    assert list(cut.blocks) == [int(newest - behind)]
    assert mark.complete_to <= int(newest - behind)


def replace_arrival(line: Request, t: float) -> Request:
    return line._replace(t=t, id=f"late-{t}")


def test_silence_completes_seconds_too() -> None:
    mark, cut = cut_requests(Mark(), [], arm=ARM, shares={3: 0.3}, plan=replace(PLAN, watermark_s=2.0), now=T)
    assert (mark.complete_to, dict(cut.blocks)) == (int(T) - 4, {})
