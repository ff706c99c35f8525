"""Accumulates the evidence about a rollout's arms, from requests or from ready blocks. Pure; the journal has it all.

Evidence continues through the steps of a rollout, because the arms of a block are equal whatever the weight. Requests
with an epoch before `since` are only used to estimate stable's latency. Requests that name a version are ignored,
because they were not routed by weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import numpy as np

from serin.evidence.e_process import Array, e_value, seconds_until, split_evidence, start
from serin.evidence.histogram import BINS
from serin.formats.serving.request import Request
from serin.machine.typed_json import Document, Stored
from serin.rollout.decide.blocks import (
    NO_COUNTS,
    Block,
    CountedRows,
    Counts,
    Wealth,
    add_pairs,
    counts2json,
    json2counts,
)
from serin.rollout.decide.cutting import Arm, Mark, complete_at, counted_lines, pieces
from serin.rollout.decide.guards import (
    PROMISES,
    STABLE_PROMISES,
    QualityBet,
    compare,
    hold_to_promises,
    proven_quantiles,
    remember,
    reversed_name,
)
from serin.rollout.decide.plan import Plan

RECENT_S: Final = 30

_EPOCHS: Final = 16
_QUIET_S: Final = 60.0  # without requests for this long, and for ten usual gaps, traffic has ended
_PACE_S: Final = 10  # fewer seconds say nothing about how fast evidence grows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence(Document, omit=("quality",)):
    since: int = 0  # the first weight epoch that counts
    epoch: int = 0
    shares: Mapping[int, float] = field(default_factory=dict)  # by weight epoch
    newest: float = 0.0  # arrival
    closed: int = 0  # blocks before this second are judged
    blocks: int = 0  # how many were judged
    open: Mapping[int, Block] = field(default_factory=dict)
    # Stable's latencies, or its baseline's; older ones count less.
    memory: Annotated[Array, Stored(json2counts, counts2json)] = field(default_factory=lambda: np.zeros(BINS))
    log_wealth: Mapping[str, Wealth] = field(default_factory=dict)  # by guard
    candidate: Counts = NO_COUNTS  # judged in this weight epoch
    stable: Counts = NO_COUNTS
    compared: int = 0  # the candidate's requests of this weight epoch in seconds that judge latency
    void_s: int = 0  # the other seconds
    warm_s: int = 0  # seconds in which the candidate has had requests, over all weight epochs
    split: tuple[int, int] = (0, 0)  # requests of this weight epoch's route: candidate's, all
    pace_since: int = 0  # the first second of this weight epoch in which latencies count; 0: none so far
    pace_from: Mapping[str, Wealth] = field(default_factory=dict)  # what the reversed bets owned then
    recent: tuple[tuple[int, Counts], ...] = ()  # stable's last seconds
    # All latencies: stable's, candidate's.
    seen: CountedRows = field(default_factory=lambda: np.zeros((2, BINS), dtype=np.int64))
    quality: QualityBet | None = None  # None: the candidate has no quality objective

    @property
    def stable_recent(self) -> Counts:
        return sum((counts for _, counts in self.recent), Counts())

    def worths(self) -> dict[str, float]:
        return {name: float(e_value(log_wealth)) for name, log_wealth in self.log_wealth.items()}

    @property
    def paced_s(self) -> int | None:
        """How long latencies were compared in this weight epoch; None: not long enough to tell a pace."""
        seconds = self.closed - self.pace_since
        return seconds if self.pace_since and seconds >= _PACE_S else None

    @property
    def silent_s(self) -> float:
        """For how long there have been no requests; 0: not for long. What the log may still lack is not silence."""
        silent = self.closed - self.newest
        requests = self.split[1]
        gap = (self.newest - self.pace_since) / requests if self.pace_since and requests else 0.0
        return silent if self.newest and silent >= max(_QUIET_S, 10 * gap) else 0.0

    def seconds_to_requests(self, wanted: int) -> float | None:
        """Until so many requests are compared, at the pace of this weight epoch; None: too little was seen to tell."""
        if self.paced_s is None or not self.compared:
            return None
        return max(wanted - self.compared, 0) * self.paced_s / self.compared

    def seconds_to_proof(self, name: str, target: float) -> float | None:
        """Until a reversed bet's e-value is `target`, by how it has grown in this weight epoch; infinite while it does
        not grow. None: too little was seen to tell."""
        if self.paced_s is None or name not in self.log_wealth:
            return None
        grown = self.log_wealth[name] - self.pace_from.get(name, start())
        return seconds_until(self.log_wealth[name], grown / self.paced_s, target)

    @property
    def split_evidence(self) -> float:
        return split_evidence(*self.split, self.shares.get(self.epoch, 0.0))


def fold(
    evidence: Evidence, requests: Sequence[Request], *, arm: Arm, plan: Plan, now: float | None = None
) -> Evidence:
    """Returns `evidence` with `requests` added. `now`: the log is complete up to then, so silence closes blocks too."""
    evidence = _present(evidence, arm)
    lines, before = counted_lines(requests, arm=arm, plan=plan)
    evidence = _remember_before(evidence, before)
    mark = Mark(newest=evidence.newest, complete_to=evidence.closed)
    for piece in pieces(mark, lines, evidence.shares, plan):
        if piece.restart is not None:
            evidence = _close(evidence, plan, before=None)
            evidence = replace(evidence, newest=piece.restart.newest, closed=piece.restart.complete_to)
        evidence = _add(evidence, piece.blocks.items(), newest=piece.mark.newest)
        evidence = _close(evidence, plan, before=piece.mark.complete_to)
    return evidence if now is None else _close(evidence, plan, before=complete_at(now, plan))


def fold_blocks(
    evidence: Evidence,
    blocks: Iterable[tuple[int, Block]],
    *,
    arm: Arm,
    plan: Plan,
    newest: float,
    complete_to: int,
    before: Array | None = None,
) -> Evidence:
    """Returns `evidence` with blocks that gateways have cut. The blocks of a second are added before the arms are
    compared, so a second is judged once it is before `complete_to`, which is that of the slowest gateway."""
    evidence = _remember_before(_present(evidence, arm), before)
    evidence = _add(evidence, blocks, newest=newest)
    return _close(evidence, plan, before=complete_to)


def _remember_before(evidence: Evidence, before: Array | None) -> Evidence:
    return evidence if before is None else replace(evidence, memory=evidence.memory + before)


def _present(evidence: Evidence, arm: Arm) -> Evidence:
    """Resets step, split and pace for a new weight epoch, and for a new `since` also the bets on promises."""
    if evidence.epoch != arm.epoch:
        shares = dict(sorted({**evidence.shares, arm.epoch: arm.share}.items())[-_EPOCHS:])
        fresh = replace(evidence, candidate=Counts(), stable=Counts(), compared=0, void_s=0, split=(0, 0))
        evidence = replace(fresh, epoch=arm.epoch, shares=shares, pace_since=0, pace_from={})
    if evidence.since != arm.since:
        forgotten = (*PROMISES, *STABLE_PROMISES)
        log_wealth = {
            name: log_wealth for name, log_wealth in evidence.log_wealth.items() if name not in forgotten
        }
        evidence = replace(evidence, since=arm.since, log_wealth=log_wealth, open={}, recent=())
    return evidence


def _add(evidence: Evidence, blocks: Iterable[tuple[int, Block]], *, newest: float) -> Evidence:
    """Adds blocks to those of the same second. One that comes late counts in the first second that is open."""
    open_blocks = dict(evidence.open)
    for second, block in blocks:
        which = max(second, evidence.closed)
        open_blocks[which] = open_blocks[which] + block if which in open_blocks else block
    return replace(evidence, newest=max(evidence.newest, newest), open=open_blocks)


def _close(evidence: Evidence, plan: Plan, *, before: int | None) -> Evidence:
    """Judges the open blocks before a second, oldest first; None: all of them."""
    going = sorted(second for second in evidence.open if before is None or second < before)
    for second in going:
        evidence = _judge(evidence, second, evidence.open[second], plan)
    rest = {second: block for second, block in evidence.open.items() if second not in going}
    closed = max(evidence.closed, before) if before is not None else evidence.closed
    return replace(evidence, open=rest, closed=closed)


def _judge(evidence: Evidence, second: int, block: Block, plan: Plan) -> Evidence:
    warm = evidence.warm_s >= plan.warmup_s
    if warm and not evidence.pace_since:
        reversed_bets = {reversed_name(quantile) for quantile in proven_quantiles(plan)}
        owned = {name: wealth for name, wealth in evidence.log_wealth.items() if name in reversed_bets}
        evidence = replace(evidence, pace_since=second, pace_from=owned)
    log_wealth = {
        **evidence.log_wealth,
        **compare(evidence.log_wealth, evidence.memory, block.arms(warm=warm), plan),
    }
    # A candidate that takes over requests of the stable release has all traffic, which is more than its share.
    held = ((PROMISES, block.candidate, block.stable_away), (STABLE_PROMISES, block.stable, False))
    for names, counts, excused in held:
        if counts.requests and not excused:
            shares = (counts.error_share, counts.slow_share)
            log_wealth |= hold_to_promises(log_wealth, names, shares, plan)
    recent = [(at, counts) for at, counts in evidence.recent if second - RECENT_S < at <= second]
    return replace(
        evidence,
        log_wealth=log_wealth,
        memory=remember(evidence.memory, block.times[2 if plan.baseline else 0]),
        blocks=evidence.blocks + 1,
        candidate=evidence.candidate + block.candidate,
        stable=evidence.stable + block.stable,
        compared=evidence.compared + (0 if block.void or not warm else block.candidate.requests),
        void_s=evidence.void_s + block.void,
        warm_s=evidence.warm_s + (block.candidate.requests > 0),
        split=add_pairs(evidence.split, block.splits.get(evidence.epoch, (0, 0))),
        recent=(*recent, (second, block.stable)),
        seen=evidence.seen + block.bins[:2],
    )
