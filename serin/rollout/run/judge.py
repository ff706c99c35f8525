"""The judge that reads the gateway's request log. All of its state is in the evidence, and so in the journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from serin.formats.serving.quality_evidence import QualityBlocks
from serin.formats.serving.request_log import Offset, find_offset, read_requests
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.guards import bet_on_quality
from serin.rollout.decide.state import Phase, Rollout, Verdict
from serin.rollout.decide.verdict import Judgement, fails_by_latency_alone, judge_bake, judge_step
from serin.store.artifacts import Release

Quality = Callable[[Release], QualityBlocks | None]
"""What the watcher knows about the labels of a release; None: it has no quality objective."""


class LogJudge:
    """Judges a rollout by the request log, and by the labels of the candidate's answers where it has a quality
    objective. `log_clock` is the clock of the times in the log; None: the rollout's own."""

    def __init__(
        self, log: Path, log_clock: Callable[[], float] | None = None, quality: Quality | None = None
    ) -> None:
        self._log, self._log_clock, self._quality = log, log_clock, quality

    def judge(self, rollout: Rollout, t: float) -> Judgement:
        """Returns the judgement at time `t` on a rollout that is shifting or baking."""
        try:
            evidence, offset, bad_lines = self._read(rollout, t)
        except OSError as error:
            reason = f"the request log cannot be read: {error}"
            return Judgement(verdict=Verdict.INCIDENT, reason=reason, evidence=rollout.evidence)
        memory = {"offset": offset.to_json(), "bad_lines": bad_lines}
        return judge_evidence(rollout, evidence, t, quality=self._quality, memory=memory)

    def _read(self, rollout: Rollout, t: float) -> tuple[Evidence, Offset, int]:
        memory = rollout.evidence
        evidence = Evidence.from_json(memory.get("guards", {}))
        begun = "offset" in memory
        place = Offset.from_json(memory["offset"]) if begun else find_offset(self._log, rollout.evidence_from)
        bad_lines: int = memory.get("bad_lines", 0)
        more = True
        while more:
            batch = read_requests(self._log, place)
            place, more = batch.offset, batch.more
            bad_lines += batch.bad_lines
            now = None if more else self._log_clock() if self._log_clock else t
            evidence = fold(evidence, batch.requests, arm=arm_of(rollout), plan=rollout.plan, now=now)
        return evidence, place, bad_lines


def judge_evidence(
    rollout: Rollout, evidence: Evidence, t: float, *, quality: Quality | None, memory: Mapping[str, Any]
) -> Judgement:
    """Returns the judgement by this evidence, and by the labels of the rollout. `memory`: what else the judge continues
    from. A rollout that needs no evidence, as a rollback, needs no labels either."""
    labels = quality(rollout.candidate) if quality and rollout.plan.min_requests else None
    bet = None
    if labels is not None:
        bet = bet_on_quality(
            labels.blocks,
            since=rollout.evidence_from,
            loss_name=labels.loss_name,
            offline=labels.offline,
            limit=labels.limit,
        )
    evidence = replace(evidence, quality=bet)
    verdict, reason = verdict_on(rollout, evidence, t)
    alone = verdict is Verdict.FAIL and fails_by_latency_alone(rollout.plan, evidence)
    memory = {"guards": evidence.to_json(), **memory}
    return Judgement(verdict=verdict, reason=reason, evidence=memory, latency_alone=alone)


def arm_of(rollout: Rollout) -> Arm:
    return Arm(
        candidate=rollout.candidate.name,
        stable=rollout.stable.name if rollout.stable else "",
        epoch=rollout.epoch,
        share=rollout.weight_percent / 100,
        since=rollout.evidence_epoch,
    )


def verdict_on(rollout: Rollout, evidence: Evidence, t: float) -> tuple[Verdict, str]:
    elapsed_s = max(t - rollout.since, 0.0)
    if rollout.phase is Phase.BAKING:
        return judge_bake(rollout.plan, evidence, elapsed_s=elapsed_s)
    assert rollout.step is not None, "a rollout that shifts is at a step"
    last = rollout.plan.steps[rollout.step + 1] == 100
    return judge_step(rollout.plan, evidence, elapsed_s=elapsed_s, last=last)
