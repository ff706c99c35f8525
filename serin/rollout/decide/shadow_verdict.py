"""Judges a candidate by its answers to recorded requests. Pure.

It is refused when a served score is not what its own bundle computes for the row, when its scores differ from those of
the live version by more than the plan allows, or when it breaks a promise about failed or slow requests. Latencies are
not compared with the live version's: recorded requests come in another order and at another pace.
"""

from __future__ import annotations

from typing import Final

from serin.evidence.histogram import latency_name
from serin.rollout.decide.plan import Plan
from serin.rollout.decide.sentences import finding, percent, too_slow
from serin.rollout.decide.shadow import ALL_ROWS, Difference, Tally
from serin.rollout.decide.verdict import Verdict

_START_S: Final = 5.0  # the replay has this long to start before missing requests hold the rollout


def judge_shadow(plan: Plan, tally: Tally, *, elapsed_s: float) -> tuple[Verdict, str]:
    """Returns the verdict on a candidate that has been answering recorded requests for `elapsed_s`."""
    assert plan.shadow is not None, "called for a plan with recorded requests"
    if tally.mismatch:
        return Verdict.FAIL, f"it does not serve what its bundle computes: {tally.mismatch}; asked twice"
    if tally.e_value >= plan.rollback_at:
        return Verdict.FAIL, f"{finding(plan, tally.broken)}; {_answers(plan, tally)}"
    if tally.unable:
        return Verdict.INVALID, f"recorded requests cannot be replayed: {tally.unable}"
    if tally.rows == 0 and tally.waiting and elapsed_s >= _START_S:
        return Verdict.NO_TRAFFIC, f"{tally.waiting}; it waits for them, or for `serin rollout promote`"
    missing = _missing(plan, tally, elapsed_s)
    if missing and elapsed_s >= plan.deadline_s:
        return Verdict.INCONCLUSIVE, f"not settled by the deadline of {plan.deadline_s:.0f} s: {missing}"
    if missing:
        return Verdict.WAIT, missing
    limit = plan.shadow.max_difference
    if limit is not None and (far := tally.beyond(limit)):
        worst = "; ".join(f"{name}: {difference(found)}" for name, found in far[:3])
        more = f" and {len(far) - 3} more" if len(far) > 3 else ""
        return Verdict.FAIL, (
            f"its scores differ from the live version's by more than {percent(limit)} of the mean score: {worst}{more}"
        )
    return Verdict.PASS, f"{_equal(tally)}; {_differs(tally)}; {_answers(plan, tally)}"


def difference(found: Difference) -> str:
    """How the candidate's scores differ on the rows of a segment, as text."""
    lost = f", {found.lost} scores are not numbers" if found.lost else ""
    if not found.rows:
        return f"0 rows{lost}"
    share = f" ({percent(found.absolute / found.live)})" if found.live else ""
    return f"{found.mean_absolute:.3g}{share} on average, {found.mean:+.3g} with its sign, in {found.rows} rows{lost}"


def _missing(plan: Plan, tally: Tally, elapsed_s: float) -> str:
    """Describes what the step still needs; empty: nothing."""
    assert plan.shadow is not None
    waiting = f"; {tally.waiting}" if tally.waiting else ""
    if tally.rows < plan.shadow.rows:
        return f"{tally.rows} of {plan.shadow.rows} recorded rows are answered{waiting}"
    if elapsed_s < plan.shadow.time_s:
        return (
            f"{elapsed_s:.0f} of {plan.shadow.time_s:.0f} s, {tally.rows} recorded rows are answered{waiting}"
        )
    if tally.counts.error_share > plan.max_error_share:
        return f"{_answers(plan, tally)}; {percent(plan.max_error_share)} may fail"
    return too_slow(plan, tally.counts)


def _equal(tally: Tally) -> str:
    unsteady = f" ({tally.unsteady} only when they were asked again)" if tally.unsteady else ""
    if not tally.compared:
        return f"{tally.rows} recorded rows are answered; it has no graph to compare the scores with"
    return f"{tally.compared} recorded rows are answered as its bundle computes them{unsteady}"


def _differs(tally: Tally) -> str:
    everywhere = [(name, found) for name, found in tally.segments.items() if name.startswith(ALL_ROWS)]
    if not everywhere:
        return "the live version's scores are not recorded"
    _, widest = max(everywhere, key=lambda entry: entry[1].relative)
    return f"its scores differ from the live version's by {difference(widest)}"


def _answers(plan: Plan, tally: Tally) -> str:
    names = "/".join(latency_name(quantile) for quantile in plan.quantiles)
    shown = "/".join("-" if us is None else f"{us / 1000:.3g}" for us in tally.quantiles_us(plan))
    failure = f" ({tally.failure})" if tally.failure else ""
    return f"{tally.counts.errors} of {tally.counts.requests} requests failed{failure}, {names} {shown} ms"
