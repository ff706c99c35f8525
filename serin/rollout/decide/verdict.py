"""Judges the evidence of a rollout: a verdict and its reason. Pure; it does not decide what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from serin.evidence.histogram import latency_name
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.guards import PROMISES, QUALITY, STABLE_PROMISES, WEIGHT, weights
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.sentences import (
    NOTHING_AGAINST,
    arms,
    doubt,
    not_proven,
    silence,
    too_few,
    too_slow,
    verdict_against,
)
from serin.rollout.decide.state import Verdict

SPLIT_AT: Final = 1000.0  # evidence against the split: one false alarm in a thousand rollouts

_QUIET_S: Final = 5.0  # silence in the log for this long means that there is no traffic
PASS_AT: Final = 1.0  # the most evidence with which a step passes: the value at the start of a rollout
_ROUNDING: Final = 1e-9
_INCIDENT_AT: Final = 20.0  # evidence that stable breaks a promise
_STABLE_REQUESTS: Final = 20  # fewer in the last seconds are not enough to judge the stable release


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
    shares, worths = _shares(plan, evidence), evidence.worths()
    if evidence.quality is not None:
        worths[QUALITY] = evidence.quality.e_value
    counted = {name: worths.get(name, 1.0) for name in shares}
    excused = tuple(name for name in PROMISES if _stable_breaks(plan, evidence, name))
    for name in excused:
        counted[name] = 0.0
    total = sum(shares[name] * counted[name] for name in shares)
    return Weighed(total=total, worths=counted, excused=excused)


def _shares(plan: Plan, evidence: Evidence) -> dict[str, float]:
    """Returns the weights of the guards; the quality guard is one of them when there is a quality objective."""
    shares = weights(plan)
    if evidence.quality is None:
        return shares
    return {**{name: (1 - WEIGHT) * share for name, share in shares.items()}, QUALITY: WEIGHT}


def judge_step(plan: Plan, evidence: Evidence, *, elapsed_s: float, last: bool) -> tuple[Verdict, str]:
    """Returns the verdict on a step that began `elapsed_s` ago; `last`: the next step has all traffic."""
    weighed = weigh(plan, evidence)
    if weighed.total >= plan.rollback_at:
        return Verdict.FAIL, verdict_against(plan, evidence, weighed.strongest)
    worths = evidence.worths()
    if any(worths.get(name, 1.0) >= plan.rollback_at for name in weighed.excused):
        return Verdict.INCIDENT, f"both arms break a promise: {arms(plan, evidence)}"
    if evidence.split_evidence >= SPLIT_AT:
        (got, of), asked = evidence.split, evidence.shares.get(evidence.epoch, 0.0)
        return Verdict.INVALID, (
            f"the candidate has {got} of {of} requests ({got / of:.2%}) instead of {asked:.2%}"
        )
    seen = evidence.candidate.requests
    if elapsed_s < plan.step_s:
        so_far = f"{elapsed_s:.0f} of {plan.step_s:.0f} s, {seen} requests"
        return Verdict.WAIT, _and_silence(so_far, evidence)
    if plan.min_requests > 0 and (evidence.split[1] == 0 or seen == 0):
        return _silent(plan, elapsed_s)
    missing = _against(plan, evidence, weighed)
    if not missing and plan.min_requests == 0:
        return Verdict.PASS, f"{plan.step_s:.0f} s; no evidence required"
    if missing := missing or _missing(plan, evidence, last=last):
        silent = silence(evidence)
        missing = f"{silent}; {missing}" if silent else missing
        if elapsed_s >= plan.deadline_s:
            return Verdict.INCONCLUSIVE, f"not settled by the deadline of {plan.deadline_s:.0f} s: {missing}"
        return Verdict.NO_TRAFFIC if silent else Verdict.WAIT, missing
    return Verdict.PASS, f"{seen} requests, {NOTHING_AGAINST}; {arms(plan, evidence)}"


def judge_bake(plan: Plan, evidence: Evidence, *, elapsed_s: float) -> tuple[Verdict, str]:
    """Returns the verdict on a candidate that has had all traffic for `elapsed_s`.

    There is no control any more. Earlier steps have ensured a minimum of traffic; without earlier steps the bake must
    ensure it.
    """
    weighed = weigh(plan, evidence)
    if weighed.total >= plan.rollback_at:
        return Verdict.FAIL, verdict_against(plan, evidence, weighed.strongest)
    seen = evidence.candidate
    clear = weighed.total <= PASS_AT + _ROUNDING
    what = (
        f"{seen.requests} requests, {seen.errors} failed, "
        f"{NOTHING_AGAINST if clear else doubt(plan, weighed.strongest, weighed.total)}"
    )
    what = _and_silence(what, evidence)
    if elapsed_s < plan.bake_s:
        return Verdict.WAIT, f"baking for {elapsed_s:.0f} of {plan.bake_s:.0f} s, {what}"
    if plan.min_requests > 0 and seen.requests == 0:
        return _silent(plan, elapsed_s)
    if len(plan.steps) == 1 and seen.requests < plan.min_requests:
        few = f"baked for {elapsed_s:.0f} s, {seen.requests} of {plan.min_requests} requests"
        return Verdict.WAIT, _and_silence(few, evidence)
    if broken := too_slow(plan, seen):
        return Verdict.WAIT, _and_silence(f"baked for {elapsed_s:.0f} s, {broken}", evidence)
    return Verdict.PASS, f"baked for {elapsed_s:.0f} s, {what}"


def fails_by_latency_alone(plan: Plan, evidence: Evidence) -> bool:
    """Returns whether only the comparison of latencies is against the candidate, and it keeps every promise."""
    shares, weighed, seen = _shares(plan, evidence), weigh(plan, evidence), evidence.candidate
    latency = {latency_name(quantile) for quantile in plan.quantiles}
    rest = sum(shares[name] * weighed.worths[name] for name in shares if name not in latency)
    kept = seen.error_share <= plan.max_error_share and not too_slow(plan, seen)
    return weighed.total >= plan.rollback_at and rest <= PASS_AT and kept


def _silent(plan: Plan, elapsed_s: float) -> tuple[Verdict, str]:
    if elapsed_s < _QUIET_S + plan.watermark_s:
        return Verdict.WAIT, "no request in the log yet"
    return Verdict.NO_TRAFFIC, (
        f"no request reached the candidate in {elapsed_s:.0f} s; it waits for requests, or for "
        "`serin rollout promote`, which needs no evidence"
    )


def _and_silence(text: str, evidence: Evidence) -> str:
    silent = silence(evidence)
    return f"{text}; {silent}" if silent else text


def _against(plan: Plan, evidence: Evidence, weighed: Weighed) -> str:
    """Describes evidence against the candidate that is not enough for a rollback; empty: none.

    Waiting costs little: the evidence of a good candidate soon falls below its initial value.
    """
    if weighed.total > PASS_AT + _ROUNDING:
        return f"{doubt(plan, weighed.strongest, weighed.total)}; {arms(plan, evidence)}"
    return too_slow(plan, evidence.candidate)


def _missing(plan: Plan, evidence: Evidence, *, last: bool) -> str:
    """Describes the observations that the step still needs; empty: nothing."""
    if evidence.compared < plan.min_requests:
        return too_few(plan, evidence)
    return not_proven(plan, evidence) if last else ""


def _stable_breaks(plan: Plan, evidence: Evidence, promise: str) -> bool:
    """Returns whether stable breaks a promise by its own bets since the rollout began, and still in the last
    seconds."""
    index, recent = PROMISES.index(promise), evidence.stable_recent
    share = (recent.error_share, recent.slow_share)[index]
    limit = (plan.max_error_share, plan.max_slow_share)[index]
    if recent.requests < _STABLE_REQUESTS or share <= limit:
        return False
    return evidence.worths().get(STABLE_PROMISES[index], 1.0) >= _INCIDENT_AT
