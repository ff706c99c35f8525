"""The judgement on a rollout by its evidence and by the labels of its answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from serin.formats.serving.quality_evidence import QualityBlocks
from serin.rollout.decide.cutting import Arm
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.guards import bet_on_quality
from serin.rollout.decide.state import Phase, Rollout, Verdict
from serin.rollout.decide.verdict import Judgement, fails_by_latency_alone, judge_bake, judge_step
from serin.store.artifacts import Release

Quality = Callable[[Release], QualityBlocks | None]
"""What the watcher knows about the labels of a release; None: it has no quality objective."""


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
