"""A rollout as it went, from its journal alone: the evidence over time, both arms' latencies, every decision. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serin.evidence.e_process import Array
from serin.formats.serving.journal import Decision
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Rollout
from serin.rollout.decide.verdict import Verdict, Weighed, weigh
from serin.rollout.run.record import decision2rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What was known at a time. `proofs` are the reversed bets."""

    t: float
    weight_percent: float
    weighed: Weighed
    proofs: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Story:
    rollout: Rollout  # as it is now, or as it ended
    began: float
    ended: float | None
    decisions: tuple[Decision, ...]  # those that changed something
    points: tuple[Point, ...]
    latencies: tuple[Array, Array] | None  # bin counts: stable's, candidate's

    @property
    def plan(self) -> Plan:
        return self.rollout.plan

    @property
    def stable_name(self) -> str:
        return self.rollout.stable.name if self.rollout.stable else "nothing"

    @property
    def control(self) -> str:
        """What the candidate was held against, for people."""
        if self.rollout.baseline:
            return f"a process of its own below 50% ({self.rollout.baseline.name}), then {self.stable_name} itself"
        return f"as many requests of {self.stable_name}, drawn by lot"


def tell(decisions: Sequence[Decision]) -> Story:
    """The story of one rollout's decisions, oldest first; there is at least one."""
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
    return Story(
        rollout=last,
        began=decisions[0].t,
        ended=decisions[-1].t if last.phase.final else None,
        decisions=tuple(changes),
        points=tuple(points),
        latencies=(newest.seen[0], newest.seen[1]) if newest else None,
    )


def point(now: Rollout, evidence: Evidence, t: float) -> Point:
    proofs = {name: worth for name, worth in evidence.worths().items() if name.startswith("not slower")}
    return Point(t=t, weight_percent=now.weight_percent, weighed=weigh(now.plan, evidence), proofs=proofs)


def _changes(before: Rollout, now: Rollout) -> bool:
    """More than that it waits now, which every step does first."""
    waits = now.verdict is Verdict.WAIT
    return now.milestone != (replace(before, verdict=now.verdict) if waits else before).milestone


def _evidence(decision: Decision) -> Evidence | None:
    guards = decision.evidence.get("guards")
    return Evidence.from_json(guards) if guards else None
