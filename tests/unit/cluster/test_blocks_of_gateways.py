"""Blocks that several gateways cut and a controller adds are the evidence of one gateway that saw all requests."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serin.formats.serving.request import Request
from serin.rollout.decide.blocks import Block
from serin.rollout.decide.cutting import Arm, Cut, Mark, complete_at, cut_requests
from serin.rollout.decide.evidence import Evidence, fold, fold_blocks
from serin.rollout.decide.plan import Plan
from tests.fakes.traffic import CANDIDATE, STABLE, Traffic

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
        evidence = fold_blocks(
            evidence,
            cut.blocks.items(),
            arm=ARM,
            plan=PLAN,
            newest=mark.newest,
            complete_to=0,
            before=cut.before,
        )
    while any(gateway.lines for gateway in places) or any(
        gateway.mark.complete_to < complete_at(END, PLAN) for gateway in places
    ):
        gateway = places[random.integers(0, gateways)]
        cut, mark = gateway.read(int(random.integers(1, reads + 1)))
        evidence = fold_blocks(
            evidence,
            cut.blocks.items(),
            arm=ARM,
            plan=PLAN,
            newest=mark.newest,
            complete_to=min(each.mark.complete_to for each in places),
            before=cut.before,
        )
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
