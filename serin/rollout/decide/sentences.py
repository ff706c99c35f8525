"""What the evidence says, in sentences for people: what was found, how sure that is, what is missing, for how long.

Pure. Shares are those of the spec: a candidate is rolled back when chance explains what was seen in at most
`false_rollback` of rollouts, and promoted when it does so in at most `false_promotion`.
"""

from __future__ import annotations

import math
from typing import Final

from serin.evidence.e_process import Array
from serin.evidence.histogram import latency_name, quantiles_us
from serin.rollout.decide.blocks import Counts
from serin.rollout.decide.evidence import Evidence
from serin.rollout.decide.guards import ERRORS, PROMISES, QUALITY, REFUSED, proven_quantiles, reversed_name
from serin.rollout.decide.plan import Plan

NOTHING_AGAINST: Final = "nothing speaks against it"
_LONG_SILENCE_S: Final = 12 * 3600  # a time of day does not say on which day


def finding(plan: Plan, guard: str) -> str:
    """What the evidence of a guard means."""
    slow = percent(plan.max_slow_share)
    return {
        ERRORS: "it fails more often than the stable version",
        QUALITY: "its answers are worse than its quality objective allows",
        REFUSED: "it refuses more requests than the stable version",
        PROMISES[0]: f"more than {percent(plan.max_error_share)} of its requests fail",
        PROMISES[1]: f"more than {slow} of its requests take longer than {plan.slo_ms} ms",
    }.get(guard, f"its {guard} is slower than allowed ({plan.allowed})")


def verdict_against(plan: Plan, evidence: Evidence, guard: str) -> str:
    """Why a candidate is rolled back."""
    numbers = str(evidence.quality) if guard == QUALITY else arms(plan, evidence)
    return (
        f"{finding(plan, guard)}; a good version looks like this in at most {percent(plan.false_rollback)} "
        f"of rollouts; {numbers}"
    )


def doubt(plan: Plan, guard: str, e_value: float) -> str:
    """How much speaks against a candidate that is not rolled back, and from when on it would be."""
    if plan.rollback_risk(e_value) >= 1:
        return NOTHING_AGAINST
    risk, limit = percent(plan.rollback_risk(e_value)), percent(plan.false_rollback)
    return (
        f"it looks as if {finding(plan, guard)}; a good version looks like this in at most {risk} of rollouts, "
        f"it is rolled back at {limit}"
    )


def too_few(plan: Plan, evidence: Evidence) -> str:
    """What a step still lacks that has not compared enough requests."""
    if evidence.warm_s < plan.warmup_s:
        left = f" (its first {plan.warmup_s:g} s with traffic do not count, {evidence.warm_s} s are over)"
    elif evidence.silent_s:
        left = ""
    else:
        left = f" ({duration(evidence.seconds_to_requests(plan.min_requests))})"
    return f"{evidence.compared} of {plan.min_requests} requests are compared{left}{void(evidence)}"


def not_proven(plan: Plan, evidence: Evidence) -> str:
    """What is missing until the candidate may get all traffic; empty: nothing."""
    e_values = evidence.worths()
    open_ = {q: found for q in proven_quantiles(plan)
             if (found := e_values.get(reversed_name(q), 1.0)) < plan.promote_at}  # fmt: skip
    if not open_:
        return ""
    names = [latency_name(quantile) for quantile in open_]
    waits = [evidence.seconds_to_proof(reversed_name(quantile), plan.promote_at) for quantile in open_]
    known = [wait for wait in waits if wait is not None]
    wait = max(known) if len(known) == len(waits) else None
    left = "" if evidence.silent_s else f"; {duration(wait)}"
    return (
        f"waiting for evidence that {' and '.join(names)} {'is' if len(names) == 1 else 'are'} slower by at most "
        f"{plan.bad} (bad_margin{left}){void(evidence)}; {_choices(wait)}"
    )


def _choices(wait_s: float | None) -> str:
    """What a person can do while a good candidate waits for evidence."""
    comes = "it is promoted without you once there is enough"
    if wait_s is not None and math.isinf(wait_s):
        comes = "more requests, a larger rollout.bad_margin or a decision is needed"
    return f"{comes}; `serin rollout promote` promotes it now, `serin rollout abort` ends the rollout"


def too_slow(plan: Plan, seen: Counts) -> str:
    """The promise about latency that the candidate's requests have not kept so far; empty: it is kept."""
    if seen.slow_share <= plan.max_slow_share:
        return ""
    return (
        f"{seen.slow} of {seen.requests} requests took longer than {plan.slo_ms:g} ms, "
        f"{percent(plan.max_slow_share)} of them may"
    )


def arms(plan: Plan, evidence: Evidence) -> str:
    """Both arms in numbers."""
    stable, candidate = evidence.seen
    return (
        f"candidate: {_failed(evidence.candidate)}, {latencies(plan, candidate)}; "
        f"stable: {_failed(evidence.stable)}, {_ms(plan, stable)}"
    )


def latencies(plan: Plan, counts: Array) -> str:
    """The plan's quantiles of counted latencies, such as `p50/p95 1.2/3.4 ms`."""
    return f"{'/'.join(latency_name(quantile) for quantile in plan.quantiles)} {_ms(plan, counts)}"


def silence(evidence: Evidence) -> str:
    """Since when there have been no requests; empty: there are some."""
    if not evidence.silent_s:
        return ""
    if evidence.silent_s >= _LONG_SILENCE_S:
        return f"no requests for {evidence.silent_s / 3600:.0f} h"
    hours, minutes = divmod(int(evidence.newest % 86_400) // 60, 60)
    return f"no requests since {hours:02}:{minutes:02} UTC"


def void(evidence: Evidence) -> str:
    took_over = "one release took over more than a tenth of another's requests"
    return f"; {evidence.void_s} s do not count: {took_over}" if evidence.void_s else ""


def duration(seconds: float | None) -> str:
    """A wait, as precise as it is known."""
    if seconds is None:
        return "not enough traffic to tell how long it takes"
    if math.isinf(seconds):
        return "at this traffic it does not come closer"
    if seconds < 10:
        about = "less than 10 s"
    elif seconds < 90:
        about = f"about {round(seconds, -1):.0f} s"
    elif seconds < 5400:
        about = f"about {seconds / 60:.0f} min"
    else:
        about = f"about {seconds / 3600:.0f} h"
    return f"{about} left at this traffic"


def percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else "100%"


def _failed(counts: Counts) -> str:
    refused = f", {counts.refused} refused" if counts.refused else ""
    return f"{counts.errors} of {counts.requests} failed{refused}"


def _ms(plan: Plan, counts: Array) -> str:
    quantiles = quantiles_us(counts, plan.quantiles)
    return f"{'/'.join('-' if us is None else f'{us / 1000:.3g}' for us in quantiles)} ms"
