"""The bets of each guard of a rollout, block by block. Pure; arrays may have leading axes, one entry per rollout.

Comparing guards compare the candidate with an arm of the same weight:

    errors         requests that failed on their arm's release
    refused        requests that their arm's release rejects as the client's fault: both arms have the same clients
    p50, p95 ...   candidate slower than (1 + margin) x, control slower than x; x: stable's quantile, from the past only

Promise guards compare one arm with a promised share, whatever the other arm does: `promise errors`, `promise latency`.
The reversed bets, `not slower p50` and so on, win when the candidate is clearly not slower by the bad margin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from serin.evidence.e_process import Array, bet, bet_on_share, difference, e_value, start
from serin.evidence.histogram import latency_name, quantile_bins, slower_than
from serin.machine.typed_json import Document
from serin.rollout.decide.plan import Plan

ERRORS: Final = "errors"
REFUSED: Final = "refused"
PROMISES: Final = ("promise errors", "promise latency")
STABLE_PROMISES: Final = ("stable's promise errors", "stable's promise latency")

MEMORY_KEEPS: Final = 0.98  # of stable's past, per block: about the last minute counts
MEMORY_NEEDS: Final = 20  # requests before a quantile of them is used for bets

_PROMISE_WEIGHT: Final = 0.2
_ERRORS_WEIGHT: Final = 0.25
_REFUSED_WEIGHT: Final = 0.05
QUALITY: Final = "quality"
WEIGHT: Final = 0.2  # among the guards, when a release has a quality objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """One block. `control` and `candidate` have equal weight.

    The first two bin counts are of plain latencies. The others are of the candidate's latencies reduced by the margin,
    and by the bad margin.
    """

    stable: Array  # (..., bins)
    control: Array
    candidate: Array
    candidate_bad: Array | None  # None: no reversed bets in this block
    control_errors: Array  # (...)
    candidate_errors: Array
    control_refused: Array
    candidate_refused: Array


def reversed_name(quantile: float) -> str:
    return f"not slower {latency_name(quantile)}"


def proven_quantiles(plan: Plan) -> tuple[float, ...]:
    """Returns the quantiles at which a candidate must prove itself: beyond p95 the proof would take too long."""
    return tuple(quantile for quantile in plan.quantiles if quantile <= 0.95) or plan.quantiles[:1]


def weights(plan: Plan) -> dict[str, float]:
    """Returns the weights of the guards that can roll a candidate back; they sum to 1."""
    each = (1 - _ERRORS_WEIGHT - _REFUSED_WEIGHT - _PROMISE_WEIGHT) / len(plan.quantiles)
    return {
        ERRORS: _ERRORS_WEIGHT,
        REFUSED: _REFUSED_WEIGHT,
        **{latency_name(quantile): each for quantile in plan.quantiles},
        **{name: _PROMISE_WEIGHT / len(PROMISES) for name in PROMISES},
    }


def compare(log_wealth: Mapping[str, Array], memory: Array, arms: Arms, plan: Plan) -> dict[str, Array]:
    """Returns the log wealth of the comparing guards after a block. `memory` is stable's past, without this block."""
    after = {
        ERRORS: _bet(log_wealth, ERRORS, arms.candidate_errors, arms.control_errors),
        REFUSED: _bet(log_wealth, REFUSED, arms.candidate_refused, arms.control_refused),
    }
    limits, ready = quantile_bins(memory, plan.quantiles), memory.sum(axis=-1) >= MEMORY_NEEDS
    control, candidate, candidate_bad = (
        None if counts is None else slower_than(counts, limits) * ready[..., None]
        for counts in (arms.control, arms.candidate, arms.candidate_bad)
    )
    assert control is not None
    assert candidate is not None
    for index, quantile in enumerate(plan.quantiles):
        name = latency_name(quantile)
        after[name] = _bet(log_wealth, name, candidate[..., index], control[..., index])
        if candidate_bad is not None and quantile in proven_quantiles(plan):
            name = reversed_name(quantile)
            after[name] = _bet(log_wealth, name, control[..., index], candidate_bad[..., index])
    return after


def remember(memory: Array, stable: Array) -> Array:
    """Returns stable's past with one more block."""
    return memory * MEMORY_KEEPS + stable


def hold_to_promises(
    log_wealth: Mapping[str, Array], names: Sequence[str], shares: Sequence[Array | float], plan: Plan
) -> dict[str, Array]:
    """Returns the log wealth of the promise guards after a block in which an arm had these shares of failed and slow
    ones."""
    targets = (plan.max_error_share, plan.max_slow_share)
    return {
        name: bet_on_share(_owned(log_wealth, name), share, target)
        for name, share, target in zip(names, shares, targets, strict=True)
    }


def _bet(log_wealth: Mapping[str, Array], name: str, worse: Array, better: Array) -> Array:
    return bet(_owned(log_wealth, name), difference(worse, better))


def _owned(log_wealth: Mapping[str, Array], name: str) -> Array:
    found = log_wealth.get(name)
    return start() if found is None else found


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityBet(Document):
    """`e_value`: evidence that the mean loss is above `limit`. `mean`: of `rows` labelled rows in `blocks` blocks."""

    loss_name: str
    offline: float
    limit: float
    e_value: float = 1.0
    mean: float | None = None
    rows: int = 0
    blocks: int = 0

    def __str__(self) -> str:
        mean = "no label has come yet"
        if self.mean is not None:
            mean = f"is {self.mean:.4g} on {self.rows} labelled rows"
        limit = f"at most {self.limit:.4g} is allowed ({self.offline:.4g} on the test rows)"
        return f"its mean {self.loss_name} {mean}, {limit}"


def bet_on_quality(
    blocks: Iterable[tuple[float, float, int]], *, since: float, loss_name: str, offline: float, limit: float
) -> QualityBet:
    """Bets on the blocks that ended after `since`. Each is (when the period of its requests ended, mean loss, rows)."""
    log_wealth, rows, total, count = start(), 0, 0.0, 0
    for ended, mean, size in blocks:
        if ended <= since:
            continue
        log_wealth = bet_on_share(log_wealth, mean, limit)
        rows, total, count = rows + size, total + mean * size, count + 1
    return QualityBet(
        loss_name=loss_name,
        offline=offline,
        limit=limit,
        e_value=float(e_value(log_wealth)),
        mean=total / rows if rows else None,
        rows=rows,
        blocks=count,
    )
