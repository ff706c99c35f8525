"""The plan of one rollout: fixed when it starts, stored in its journal. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from annotated_types import Ge, Gt, Interval, MinLen

from serin.machine.typed_json import Document, Stored, json2value

if TYPE_CHECKING:
    from serin.spec.objectives import ObjectivesSpec
    from serin.spec.rollout import RolloutSpec
    from serin.spec.serving import ServingSpec

Mode = Literal["enforce", "hold", "observe"]
Share = Annotated[float, Interval(ge=0, le=1)]
Risk = Annotated[float, Interval(gt=0, le=1)]
Span = Annotated[float, Interval(ge=0, lt=math.inf)]
"""Seconds, milliseconds or a part of a latency."""

_LONGEST_WAIT_S: Final = 2.0
_TOLERANCE: Final = 0.02  # of the promised latency: a slowdown that no client can notice
_RESERVE: Final = 2.0  # a safety factor: bets assume independent blocks, but a paused process affects several


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPlan:
    """What a candidate must do with recorded requests before it gets traffic."""

    rows: Annotated[int, Ge(1)] = 1000
    time_s: Span = 30.0
    share: Risk = 0.2  # of the live version's requests per second
    # Mean absolute difference of scores, as a share of the mean score.
    max_difference: Annotated[float, Interval(gt=0, lt=math.inf)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """Times are seconds, steps and weights percent of traffic. The last step is always 100: the bake."""

    steps: tuple[float, ...] = (1.0, 5.0, 25.0, 50.0, 100.0)
    approve: tuple[float, ...] = ()  # the steps that a person must approve
    step_s: Span = 30.0
    min_requests: Annotated[int, Ge(0)] = 100  # 0: a step passes by time alone
    false_rollback: Risk = 0.01
    false_promotion: Risk = 0.05
    quantiles: Annotated[tuple[Annotated[float, Interval(gt=0, lt=1)], ...], MinLen(1)] = (0.5, 0.95, 0.99)
    margin: Span = 0.10
    bad_margin: Span = 0.20
    tolerance_ms: Span = 0.0  # a candidate slower by no more than this is not slower
    warmup_s: Span = 10.0  # latencies of the candidate's first seconds with traffic are not compared
    error_tolerance: Annotated[float, Ge(1)] = 1.0
    max_error_share: Share = 0.006
    slo_ms: Annotated[float, Gt(0)] | None = None  # None: no promise about latency
    max_slow_share: Share = 0.06  # of requests slower than slo_ms
    watermark_s: Span = (
        _LONGEST_WAIT_S  # blocks are judged this long after their end; later lines count later
    )
    bake_s: Span = 600.0
    deadline_s: Span = 3600.0
    mode: Mode = "enforce"
    second_opinion: bool = False  # the candidate is restarted before a rollback for latency alone
    baseline: bool = False  # below 50 the control is a second process of the stable version
    load_s: Span = 300.0  # a release that is not ready by then is rejected
    drain_s: Span = 30.0  # a release that still has requests then is stopped anyway
    unready_s: Span = 2.0  # a process that lives but is not ready for this long counts as dead
    shadow: ShadowPlan | None = None  # recorded requests come before the first step

    @classmethod
    def from_spec(cls, spec: RolloutSpec, serving: ServingSpec, objectives: ObjectivesSpec) -> Self:
        """Makes a plan from the sections of a spec."""
        from serin.spec.objectives import page_share

        latency, shadow, timeout_s = spec.latency, spec.shadow, serving.request_timeout
        tolerance_ms = latency.tolerance_ms
        return cls(
            steps=tuple(float(step) for step in spec.shares),
            approve=tuple(float(step) for step in spec.approve),
            step_s=spec.step_time,
            min_requests=spec.min_requests,
            false_rollback=spec.false_rollback,
            false_promotion=spec.false_promotion,
            quantiles=tuple(sorted(latency.quantiles)),
            margin=latency.margin,
            bad_margin=2 * latency.margin if latency.bad_margin is None else latency.bad_margin,
            tolerance_ms=_TOLERANCE * objectives.latency_ms if tolerance_ms is None else tolerance_ms,
            warmup_s=spec.warmup,
            error_tolerance=spec.error_tolerance,
            max_error_share=page_share(objectives.availability),
            slo_ms=objectives.latency_ms,
            max_slow_share=page_share(objectives.latency_share),
            watermark_s=min(timeout_s, _LONGEST_WAIT_S),
            bake_s=spec.bake,
            deadline_s=spec.deadline,
            mode=spec.mode,
            second_opinion=spec.second_opinion,
            baseline=spec.baseline,
            drain_s=max(30.0, 2 * timeout_s),
            shadow=None
            if not spec.has_shadow
            else ShadowPlan(
                rows=shadow.rows,
                time_s=shadow.time,
                share=shadow.share,
                max_difference=shadow.max_difference,
            ),
        )

    def at_once(self) -> Self:
        """Returns a plan with all traffic in one step. Somebody requested it, so nothing waits for requests."""
        return replace(self, steps=(100.0,), approve=(), min_requests=0, shadow=None)

    @property
    def rollback_at(self) -> float:
        """The evidence that rolls a candidate back: twice what the bets alone would need."""
        return _RESERVE / self.false_rollback

    @property
    def promote_at(self) -> float:
        return 1.0 / self.false_promotion

    def rollback_risk(self, e_value: float) -> float:
        """The largest share of rollouts of a good version that ever look as bad as this; rolled back at
        `false_rollback`."""
        return min(1.0, _RESERVE / max(e_value, _RESERVE))

    def promotion_risk(self, e_value: float) -> float:
        """The largest share of rollouts of a version slower by the bad margin that ever look as good as this."""
        return 1.0 / max(e_value, 1.0)

    @property
    def bad_tolerance_ms(self) -> float:
        """Twice the tolerance, so that a candidate that uses all of the tolerance can still be proven."""
        return 2 * self.tolerance_ms

    @property
    def allowed(self) -> str:
        """How much slower a candidate may be, as text."""
        return _slower(self.margin, self.tolerance_ms)

    @property
    def bad(self) -> str:
        """How much slower it must be proven not to be, as text."""
        return _slower(self.bad_margin, self.bad_tolerance_ms)

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads a plan. Unknown fields and impossible values are refused, because the value may come from a person."""
        plan = json2value(cls, document)
        steps = plan.steps
        rising = all(low < high for low, high in pairwise((0.0, *steps)))
        if not steps or steps[-1] != 100 or not rising:
            raise ValueError(f"steps {list(steps)} must increase, start above 0 and end with 100")
        if plan.margin > plan.bad_margin:
            raise ValueError(f"bad_margin {plan.bad_margin} must not be smaller than margin {plan.margin}")
        return plan


StoredPlan = Annotated[Plan, Stored(Plan.from_json, Plan.to_json)]
"""It is checked when it is read."""


def _slower(margin: float, tolerance_ms: float) -> str:
    return f"{margin:.0%} or {tolerance_ms:g} ms, whichever is more" if tolerance_ms else f"{margin:.0%}"
