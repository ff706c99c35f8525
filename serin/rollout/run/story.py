"""Reconstructs a rollout from its journal: the evidence over time, both arms' latencies, every decision. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from serin.formats.serving.journal import Decision
from serin.reports.rollout_page import EvidencePoint, RolloutStory, ShadowSegment, ShadowStory, StoryRules
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.sentences import latencies
from serin.rollout.decide.shadow import Tally
from serin.rollout.decide.state import SHADOW, Phase, Rollout, Verdict
from serin.rollout.decide.verdict import weigh
from serin.rollout.run.record import decision2rollout

_TURNS: Final = {  # the phase in which the outcome was decided
    Phase.PROMOTED: Phase.BAKING,
    Phase.ROLLED_BACK: Phase.ABORTING,
    Phase.ABORTING: Phase.ABORTING,
}


def tell(decisions: Sequence[Decision]) -> RolloutStory:
    """Returns the story of one rollout from its decisions, oldest first; there is at least one."""
    last = decision2rollout(decisions[-1])
    points, changes, before = [], [], None
    for decision in decisions:
        now = decision2rollout(decision)
        if before is None or _changes(before, now) or decision.command:
            changes.append(decision)
        before = now
        if evidence := _evidence(decision):
            points.append(point(now, evidence, decision.t))
    newest = next((found for decision in reversed(decisions) if (found := _evidence(decision))), None)
    shadowed = next((each for each in reversed(decisions) if each.evidence.get(SHADOW)), None)
    turned = next((found for found in changes if found.phase == _TURNS.get(last.phase)), changes[-1])
    return RolloutStory(
        candidate=last.candidate.name,
        stable=last.stable.name if last.stable else "nothing",
        control=_control(last),
        phase=last.phase,
        hold=last.hold,
        began_because=decisions[0].reason,
        reason=turned.reason,
        rules=_rules(last.plan),
        began=decisions[0].t,
        ended=decisions[-1].t if last.phase.final else None,
        decisions=tuple(changes),
        points=tuple(points),
        latencies=(newest.seen[0], newest.seen[1]) if newest else None,
        shadow=shadow_story(decision2rollout(shadowed)) if shadowed else None,
    )


def shadow_story(now: Rollout) -> ShadowStory | None:
    """Returns what a rollout's evidence says about recorded requests."""
    plan, tally = now.plan, Tally.from_json(now.evidence.get(SHADOW, {}))
    if plan.shadow is None:
        return None
    limit = plan.shadow.max_difference
    far = {name for name, _ in tally.beyond(limit)} if limit is not None else set()
    return ShadowStory(
        verdict=now.verdict.value if now.verdict else "",
        rows=tally.rows,
        needed=plan.shadow.rows,
        compared=tally.compared,
        unsteady=tally.unsteady,
        requests=tally.counts.requests,
        failed=tally.counts.errors,
        latency=f"{latencies(plan, tally.seen)}, {tally.counts.slow} slower than promised",
        max_difference=limit,
        segments=tuple(
            ShadowSegment(
                name=name,
                rows=found.rows + found.lost,
                live=found.mean_live,
                difference=found.mean,
                absolute=found.mean_absolute,
                relative=found.relative,
                beyond=name in far,
            )
            for name, found in tally.ordered()
        ),
        mismatch=str(tally.mismatch) if tally.mismatch else "",
        values=dict(tally.mismatch.values) if tally.mismatch else {},
    )


def point(now: Rollout, evidence: Evidence, t: float) -> EvidencePoint:
    proofs = {name: e_value for name, e_value in evidence.worths().items() if name.startswith("not slower")}
    weighed = weigh(now.plan, evidence)
    return EvidencePoint(
        t=t, weight_percent=now.weight_percent, total=weighed.total, e_values=weighed.worths, proofs=proofs
    )


def _control(now: Rollout) -> str:
    """Describes what the candidate was compared with."""
    stable = now.stable.name if now.stable else "nothing"
    if now.baseline:
        return f"a second process of the stable version below 50% ({now.baseline.name}), then {stable} itself"
    return f"an equal number of requests of {stable}, chosen at random"


def _rules(plan: Plan) -> StoryRules:
    return StoryRules(
        steps=plan.steps,
        shadow=plan.shadow is not None,
        quantiles=plan.quantiles,
        rollback_at=plan.rollback_at,
        promote_at=plan.promote_at,
        false_rollback=plan.false_rollback,
        allowed=plan.allowed,
        warmup_s=plan.warmup_s,
    )


def _changes(before: Rollout, now: Rollout) -> bool:
    """Returns whether the state changes in more than that it waits now, which every step does first."""
    waits = now.verdict is Verdict.WAIT
    return now.milestone != (replace(before, verdict=now.verdict) if waits else before).milestone


def _evidence(decision: Decision) -> Evidence | None:
    guards = decision.evidence.get("guards")
    return Evidence.from_json(guards) if guards else None
