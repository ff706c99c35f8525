"""Judges the evidence of a rollout: a verdict and its reason. Pure; it does not decide what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from serin.evidence.histogram import latency_name, quantiles_us
from serin.rollout.decide.blocks import Counts
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.guards import (
    PROMISES,
    STABLE_PROMISES,
    proven_quantiles,
    reversed_name,
    weights,
)
from serin.rollout.decide.plan import Plan

SPLIT_AT: Final = 1000.0  # evidence against the split: one false alarm in a thousand rollouts

_QUIET_S: Final = 5.0  # silence in the log for this long means that there is no traffic
PASS_AT: Final = 1.0  # the most evidence with which a step passes: the value at the start of a rollout
_ROUNDING: Final = 1e-9
_INCIDENT_AT: Final = 20.0  # evidence that stable breaks a promise
_VOID: Final = "{} s are not counted, because one release took over more than a tenth of another's requests"
_STABLE_REQUESTS: Final = 20  # fewer in the last seconds are not enough to judge the stable release


class Verdict(StrEnum):
    PASS = "pass"  # noqa: S105 - a verdict, not a password
    WAIT = "wait"
    FAIL = "fail"
    NO_TRAFFIC = "no_traffic"
    INCONCLUSIVE = "inconclusive"  # not enough was seen by the deadline
    INVALID = "invalid"  # the evidence contradicts the weights
    INCIDENT = "incident"  # the problem is not the candidate's alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict, its reason with the numbers, and the evidence as a JSON object from which the judge can continue."""

    verdict: Verdict
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    latency_alone: bool = False  # of a rollback: another process of the same version may be faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """The combined evidence of all guards; `excused` are those whose promise the stable release breaks too."""

    total: float
    worths: Mapping[str, float]
    excused: tuple[str, ...] = ()

    @property
    def strongest(self) -> str:
        return max(self.worths, key=lambda name: self.worths[name], default="")


def weigh(plan: Plan, evidence: Evidence) -> Weighed:
    """Returns the weighted mean of the guards; by chance it ever reaches x in at most one of x rollouts."""
    shares, worths = weights(plan), evidence.worths()
    counted = {name: worths.get(name, 1.0) for name in shares}
    excused = tuple(name for name in PROMISES if _stable_breaks(plan, evidence, name))
    for name in excused:
        counted[name] = 0.0
    total = sum(shares[name] * counted[name] for name in shares)
    return Weighed(total=total, worths=counted, excused=excused)


def judge_step(plan: Plan, evidence: Evidence, *, elapsed_s: float, last: bool) -> tuple[Verdict, str]:
    """Returns the verdict on a step that began `elapsed_s` ago; `last`: the next step has all traffic."""
    weighed = weigh(plan, evidence)
    if weighed.total >= plan.rollback_at:
        return Verdict.FAIL, _blame(plan, evidence, weighed)
    worths = evidence.worths()
    if any(worths.get(name, 1.0) >= plan.rollback_at for name in weighed.excused):
        return Verdict.INCIDENT, f"both arms break a promise: {_both(plan, evidence)}"
    if evidence.split_evidence >= SPLIT_AT:
        got, of = evidence.split
        return Verdict.INVALID, (
            f"the candidate has {got} of {of} requests ({got / of:.2%}) instead of {_share(evidence):.2%}"
        )
    seen = evidence.candidate.requests
    if elapsed_s < plan.step_s:
        return Verdict.WAIT, f"{elapsed_s:.0f} of {plan.step_s:.0f} s, {seen} requests"
    if plan.min_requests > 0 and (evidence.split[1] == 0 or seen == 0):
        return _silent(plan, elapsed_s)
    missing = _against(plan, evidence, weighed)
    if not missing and plan.min_requests == 0:
        return Verdict.PASS, f"{plan.step_s:.0f} s; no evidence required"
    if missing := missing or _missing(plan, evidence, last=last):
        if elapsed_s >= plan.deadline_s:
            return Verdict.INCONCLUSIVE, f"{missing} by the deadline of {plan.deadline_s:.0f} s"
        return Verdict.WAIT, missing
    return Verdict.PASS, f"{seen} requests, {_total(plan, weighed)}; {_both(plan, evidence)}"


def judge_bake(plan: Plan, evidence: Evidence, *, elapsed_s: float) -> tuple[Verdict, str]:
    """Returns the verdict on a candidate that has had all traffic for `elapsed_s`.

    There is no control any more. Earlier steps have ensured a minimum of traffic; without earlier steps the bake must
    ensure it.
    """
    weighed = weigh(plan, evidence)
    if weighed.total >= plan.rollback_at:
        return Verdict.FAIL, _blame(plan, evidence, weighed)
    seen = evidence.candidate
    what = f"{seen.requests} requests, {seen.errors} failed, {_total(plan, weighed)}"
    if elapsed_s < plan.bake_s:
        return Verdict.WAIT, f"baking for {elapsed_s:.0f} of {plan.bake_s:.0f} s, {what}"
    if plan.min_requests > 0 and seen.requests == 0:
        return _silent(plan, elapsed_s)
    if len(plan.steps) == 1 and seen.requests < plan.min_requests:
        return Verdict.WAIT, f"baked for {elapsed_s:.0f} s, {seen.requests} of {plan.min_requests} requests"
    if broken := _broken(plan, seen):
        return Verdict.WAIT, f"baked for {elapsed_s:.0f} s, {broken}"
    return Verdict.PASS, f"baked for {elapsed_s:.0f} s, {what}"


def fails_by_latency_alone(plan: Plan, evidence: Evidence) -> bool:
    """Returns whether only the comparison of latencies is against the candidate, and it keeps every promise."""
    shares, weighed, seen = weights(plan), weigh(plan, evidence), evidence.candidate
    latency = {latency_name(quantile) for quantile in plan.quantiles}
    rest = sum(shares[name] * weighed.worths[name] for name in shares if name not in latency)
    kept = seen.error_share <= plan.max_error_share and not _broken(plan, seen)
    return weighed.total >= plan.rollback_at and rest <= PASS_AT and kept


def _silent(plan: Plan, elapsed_s: float) -> tuple[Verdict, str]:
    if elapsed_s < _QUIET_S + plan.watermark_s:
        return Verdict.WAIT, "no request in the log yet"
    return Verdict.NO_TRAFFIC, f"no request reached the candidate in {elapsed_s:.0f} s"


def _against(plan: Plan, evidence: Evidence, weighed: Weighed) -> str:
    """Describes evidence against the candidate that is not enough for a rollback; empty: none.

    Waiting costs little: the evidence of a good candidate soon falls below its initial value.
    """
    if weighed.total > PASS_AT + _ROUNDING:
        return (
            f"{weighed.strongest} speaks against it: {_total(plan, weighed)}, passes at {PASS_AT:g} or less; "
            f"{_both(plan, evidence)}"
        )
    return _broken(plan, evidence.candidate)


def _broken(plan: Plan, seen: Counts) -> str:
    """Describes the promise that the candidate's requests have not kept so far; empty: none."""
    if seen.slow_share > plan.max_slow_share:
        return (
            f"{seen.slow} of {seen.requests} requests took longer than {plan.slo_ms:g} ms, "
            f"passes at {plan.max_slow_share:.3g} of them or less"
        )
    return ""


def _missing(plan: Plan, evidence: Evidence, *, last: bool) -> str:
    """Describes the observations that the step still needs; empty: nothing."""
    void = f"; {_VOID.format(evidence.void_s)}" if evidence.void_s else ""
    if evidence.compared < plan.min_requests:
        warm = f"; it warms up for {plan.warmup_s:g} s first" if evidence.warm_s < plan.warmup_s else ""
        return f"{evidence.compared} of {plan.min_requests} requests{warm}{void}"
    if last:
        worths = evidence.worths()
        proofs = {q: worths.get(reversed_name(q), 1.0) for q in proven_quantiles(plan)}
        if open_ := {q: e_value for q, e_value in proofs.items() if e_value < plan.promote_at}:
            return (
                "not proven yet: "
                + ", ".join(
                    f"{latency_name(q)} slower by less than {plan.bad} "
                    f"(evidence {e_value:.3g} of {plan.promote_at:.3g})"
                    for q, e_value in open_.items()
                )
                + void
            )
    return ""


def _stable_breaks(plan: Plan, evidence: Evidence, promise: str) -> bool:
    """Returns whether stable breaks a promise by its own bets since the rollout began, and still in the last
    seconds."""
    index = PROMISES.index(promise)
    recent = evidence.stable_recent
    share, limit = ((recent.error_share, plan.max_error_share), (recent.slow_share, plan.max_slow_share))[
        index
    ]
    if recent.requests < _STABLE_REQUESTS or share <= limit:
        return False
    return evidence.worths().get(STABLE_PROMISES[index], 1.0) >= _INCIDENT_AT


def _blame(plan: Plan, evidence: Evidence, weighed: Weighed) -> str:
    guard = weighed.strongest
    return f"{guard}: {_total(plan, weighed)}; {_both(plan, evidence)}"


def _total(plan: Plan, weighed: Weighed) -> str:
    return f"evidence {min(weighed.total, 1e9):.3g} of {plan.rollback_at:.3g}"


def _share(evidence: Evidence) -> float:
    return evidence.shares.get(evidence.epoch, 0.0)


def _both(plan: Plan, evidence: Evidence) -> str:
    """Describes both arms in numbers."""
    names = "/".join(latency_name(quantile) for quantile in plan.quantiles)
    stable, candidate = (quantiles_us(row, plan.quantiles) for row in evidence.seen)
    mine, other = evidence.candidate, evidence.stable
    refused = f"refused {mine.refused} and {other.refused}; " if mine.refused or other.refused else ""
    return (
        f"candidate failed {mine.errors} of {mine.requests}, stable {other.errors} of {other.requests}; "
        f"{refused}{names} {_ms(candidate)} against {_ms(stable)} ms"
    )


def _ms(quantiles: list[float | None]) -> str:
    return "/".join("-" if us is None else f"{us / 1000:.3g}" for us in quantiles)
