"""What the evidence says about a rollout, in one word and one sentence. Pure; says what is so, not what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from serin.rollout.evidence import Counts, Evidence
from serin.rollout.plan import Plan

_QUIET_S: Final = (
    5.0  # the gateway writes its log every second; so long must be waited before silence means no traffic
)
_PROOF: Final = 3  # failures; fewer may be chance (a connection that was closed just then)
_STABLE_REQUESTS: Final = 20  # fewer than these say nothing about the stable release
_MUCH_WORSE: Final = (
    2.0  # a candidate that fails this much more often than stable fails by itself, incident or not
)


class Verdict(StrEnum):
    PASS = "pass"  # noqa: S105 - a verdict, not a password
    WAIT = "wait"
    FAIL = "fail"
    NO_TRAFFIC = "no_traffic"
    INCONCLUSIVE = "inconclusive"  # not enough was seen by the deadline
    INVALID = "invalid"  # the evidence contradicts the weights
    INCIDENT = "incident"  # not the candidate alone is in trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict, its reason with the numbers, and the evidence as a JSON object from which the judge can go on."""

    verdict: Verdict
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


def judge_step(plan: Plan, evidence: Evidence, *, elapsed_s: float) -> tuple[Verdict, str]:
    """The verdict on a step that began `elapsed_s` ago.

    The candidate fails as soon as its failures are more than `min_requests` requests could excuse. One or two alone are
    no proof (unless none is allowed): the step waits until they are few enough among more requests.
    """
    seen = evidence.candidate
    if _has_failed(seen, plan):
        control = evidence.stable_recent
        alike = seen.error_share < _MUCH_WORSE * control.error_share
        if alike and _over_limit(control, plan, at_least=_STABLE_REQUESTS):
            return Verdict.INCIDENT, f"both fail: candidate {_of(seen)}, stable {_of(control)}"
        return Verdict.FAIL, f"candidate failed {_of(seen)}, limit {plan.max_error_share:.3%}"
    if elapsed_s < plan.step_s:
        return Verdict.WAIT, f"{elapsed_s:.0f} of {plan.step_s:.0f} s, {seen.requests} requests"
    if seen.requests == 0 and plan.min_requests > 0:
        if elapsed_s < _QUIET_S:
            return Verdict.WAIT, "no request in the log yet"
        return Verdict.NO_TRAFFIC, f"no request reached the candidate in {elapsed_s:.0f} s"
    over = _over_limit(seen, plan, at_least=0)
    if over or seen.requests < plan.min_requests:
        wanted = f"failed {_of(seen)}" if over else f"{seen.requests} of {plan.min_requests} requests"
        if elapsed_s >= plan.deadline_s:
            return Verdict.INCONCLUSIVE, f"{wanted} by the deadline of {plan.deadline_s:.0f} s"
        return Verdict.WAIT, wanted
    return Verdict.PASS, f"candidate failed {_of(seen)}, limit {plan.max_error_share:.3%}"


def judge_bake(plan: Plan, evidence: Evidence, *, elapsed_s: float) -> tuple[Verdict, str]:
    """The verdict on a candidate that has had all traffic for `elapsed_s`.

    There is no control any more, and no minimum of traffic: the steps before have seen to that.
    """
    seen = evidence.candidate
    if _has_failed(seen, plan):
        return Verdict.FAIL, f"candidate failed {_of(seen)}, limit {plan.max_error_share:.3%}"
    if elapsed_s < plan.bake_s:
        return Verdict.WAIT, f"baking for {elapsed_s:.0f} of {plan.bake_s:.0f} s, failed {_of(seen)}"
    return Verdict.PASS, f"baked for {elapsed_s:.0f} s, failed {_of(seen)}"


def _has_failed(seen: Counts, plan: Plan) -> bool:
    enough = seen.errors >= _PROOF or plan.max_error_share == 0
    return enough and _over_limit(seen, plan, at_least=plan.min_requests)


def _over_limit(seen: Counts, plan: Plan, *, at_least: int) -> bool:
    return seen.errors > plan.max_error_share * max(seen.requests, at_least)


def _of(seen: Counts) -> str:
    return f"{seen.errors} of {seen.requests} requests"
