"""Judges a stored request log again with other settings. It decides nothing and writes nothing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from serin.formats.serving.journal import Decision
from serin.formats.serving.request import Request
from serin.formats.serving.request_log import read_since
from serin.reports.rollout_page import EvidencePoint
from serin.rollout.decide.evidence import Evidence, fold
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.state import Phase, Rollout, Verdict
from serin.rollout.run.judge import arm_of, verdict_on
from serin.rollout.run.record import decision2rollout
from serin.rollout.run.story import point

_BEFORE_S = 60.0  # stable's traffic before the rollout gives its latency
_AFTER_S = 5.0  # requests still in flight at the end count too


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The judgement at the end of a second."""

    point: EvidencePoint
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    moments: tuple[Moment, ...]
    requests: int

    @property
    def failed(self) -> Moment | None:
        """The first second that would have rolled the candidate back."""
        return next((moment for moment in self.moments if moment.verdict is Verdict.FAIL), None)


def replay(decisions: Sequence[Decision], logs: Sequence[Path], change: Callable[[Plan], Plan]) -> Replay:
    """Judges the rollout's recorded weights every second with the changed plan, until it fails or ends.

    `logs`: one request log for each gateway.
    """
    course = [
        (decision.t, decision2rollout(decision))
        for decision in decisions
        if decision.phase in (Phase.SHIFTING, Phase.BAKING)
    ]
    if not course:
        return Replay(moments=(), requests=0)
    end = next((d.t for d in decisions if d.t > course[-1][0]), decisions[-1].t) + _AFTER_S
    since = course[0][0] - _BEFORE_S
    requests = sorted((request for log in logs for request in read_since(log, since)), key=_ended)
    model = course[0][1].model
    seen = [request for request in requests if request.model == model and _ended(request) <= end]
    moments = tuple(_moments(course, seen, math.ceil(end), change))
    return Replay(moments=moments, requests=sum(request.t >= course[0][0] for request in seen))


def _moments(
    course: Sequence[tuple[float, Rollout]],
    requests: Sequence[Request],
    end: int,
    change: Callable[[Plan], Plan],
) -> Iterator[Moment]:
    evidence, begins, ends, done = Evidence(), [t for t, _ in course], [_ended(r) for r in requests], 0
    for second in range(math.floor(begins[0]) + 1, end + 1):
        now = course[max(bisect_right(begins, second) - 1, 0)][1]
        now = replace(now, plan=change(now.plan))
        until = bisect_right(ends, second)
        evidence = fold(evidence, requests[done:until], arm=arm_of(now), plan=now.plan, now=float(second))
        done = until
        verdict, reason = verdict_on(now, evidence, float(second))
        yield Moment(point=point(now, evidence, float(second)), verdict=verdict, reason=reason)
        if verdict is Verdict.FAIL:
            return


def _ended(request: Request) -> float:
    return request.t + (request.us or 0.0) / 1e6
