"""The plan of one rollout: fixed when it starts, stored in its journal. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from serin.machine.typed_json import Document, Stored, json2value

if TYPE_CHECKING:
    from serin.spec.objectives import ObjectivesSpec
    from serin.spec.rollout import RolloutSpec
    from serin.spec.serving import ServingSpec

Mode = Literal["enforce", "hold", "observe"]

_LONGEST_WAIT_S: Final = 2.0
_TOLERANCE: Final = 0.02  # of the promised latency: a slowdown that no client can notice
_RESERVE: Final = 2.0  # a safety factor: bets assume independent blocks, but a paused process affects several


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowPlan:
    """What a candidate must do with recorded requests before it gets traffic."""

    rows: int = 1000
    time_s: float = 30.0
    share: float = 0.2  # of the live version's requests per second
    max_difference: float | None = None  # mean absolute difference of scores, as a share of the mean score

    def check(self) -> None:
        """Raises ValueError for numbers that no rollout could follow."""
        limit = 1.0 if self.max_difference is None else self.max_difference
        if self.rows < 1 or not 0 < self.share <= 1 or not 0 < limit < float("inf"):
            raise ValueError("shadow: rows must be at least 1, share in 0 .. 1, max_difference above 0")
        if not 0 <= self.time_s < float("inf"):
            raise ValueError("shadow: time_s must be seconds of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Document):
    """Times are seconds, steps and weights percent of traffic. The last step is always 100: the bake."""

    steps: tuple[float, ...] = (1.0, 5.0, 25.0, 50.0, 100.0)
    approve: tuple[float, ...] = ()  # the steps that a person must approve
    step_s: float = 30.0
    min_requests: int = 100  # 0: a step passes by time alone
    false_rollback: float = 0.01
    false_promotion: float = 0.05
    quantiles: tuple[float, ...] = (0.5, 0.95, 0.99)
    margin: float = 0.10
    bad_margin: float = 0.20
    tolerance_ms: float = 0.0  # a candidate slower by no more than this is not slower
    warmup_s: float = 10.0  # latencies of the candidate's first seconds with traffic are not compared
    error_tolerance: float = 1.0
    max_error_share: float = 0.006
    slo_ms: float | None = None  # None: no promise about latency
    max_slow_share: float = 0.06  # of requests slower than slo_ms
    watermark_s: float = (
        _LONGEST_WAIT_S  # a block is judged this long after its end; later lines count in later blocks
    )
    bake_s: float = 600.0
    deadline_s: float = 3600.0
    mode: Mode = "enforce"
    second_opinion: bool = False  # the candidate is restarted before a rollback for latency alone
    baseline: bool = False  # below 50 the control is a second process of the stable version
    load_s: float = 300.0  # a release that is not ready by then is rejected
    drain_s: float = 30.0  # a release that still has requests then is stopped anyway
    unready_s: float = 2.0  # a process that lives but is not ready for this long counts as dead
    shadow: ShadowPlan | None = None  # recorded requests come before the first step

    @classmethod
    def from_spec(
        cls,
        spec: RolloutSpec,
        serving: ServingSpec | None = None,
        objectives: ObjectivesSpec | None = None,
        *,
        load_s: float = 300.0,
        drain_s: float | None = None,
    ) -> Self:
        """Makes a plan from a spec. `serving` gives the longest request; `drain_s` None: from that. `objectives` None:
        nothing is promised about latency."""
        from serin.spec.objectives import ObjectivesSpec, page_share

        latency, shadow, promise = spec.latency, spec.shadow, objectives or ObjectivesSpec()
        timeout_s = serving.request_timeout if serving else _LONGEST_WAIT_S
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
            tolerance_ms=_tolerance_ms(spec, objectives),
            warmup_s=spec.warmup,
            error_tolerance=spec.error_tolerance,
            max_error_share=page_share(promise.availability),
            slo_ms=objectives.latency_ms if objectives else None,
            max_slow_share=page_share(promise.latency_share),
            watermark_s=min(timeout_s, _LONGEST_WAIT_S),
            bake_s=spec.bake,
            deadline_s=spec.deadline,
            mode=spec.mode,
            second_opinion=spec.second_opinion,
            baseline=spec.baseline,
            load_s=load_s,
            drain_s=max(30.0, 2 * timeout_s) if drain_s is None else drain_s,
            shadow=ShadowPlan(
                rows=shadow.rows,
                time_s=shadow.time,
                share=shadow.share,
                max_difference=shadow.max_difference,
            )
            if spec.has_shadow
            else None,
        )

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
        """Reads a plan. Unknown fields and impossible numbers are refused, because the value may come from a person."""
        known = {part.name for part in fields(cls)}
        if unknown := sorted(set(document) - known):
            raise ValueError(f"a plan has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        plan = json2value(cls, document)
        plan.check()
        return plan

    def check(self) -> None:
        """Raises ValueError for a plan that no rollout could follow."""
        steps = self.steps
        rising = all(low < high for low, high in pairwise(steps))
        if not steps or steps[0] <= 0 or steps[-1] != 100 or not rising:
            raise ValueError(f"steps {list(steps)} must increase, start above 0 and end with 100")
        shares = (self.max_error_share, self.max_slow_share, self.false_rollback, self.false_promotion)
        if not all(0 <= share <= 1 for share in shares) or self.min_requests < 0:
            raise ValueError(
                "max_error_share and the other shares must be in 0 .. 1, min_requests at least 0"
            )
        if not self.quantiles or not all(0 < quantile < 1 for quantile in self.quantiles):
            raise ValueError(f"quantiles {list(self.quantiles)} must be between 0 and 1")
        if min(self.false_rollback, self.false_promotion) <= 0 or self.error_tolerance < 1:
            raise ValueError("false_rollback and false_promotion must be above 0, error_tolerance at least 1")
        if not 0 <= self.margin < float("inf") or not self.margin <= self.bad_margin < float("inf"):
            raise ValueError(f"bad_margin {self.bad_margin} must not be smaller than margin {self.margin}")
        self._check_times()
        if self.shadow:
            self.shadow.check()

    def _check_times(self) -> None:
        spans = (self.step_s, self.bake_s, self.deadline_s, self.load_s, self.drain_s, self.unready_s)
        if not all(0 <= span < float("inf") for span in (*spans, self.watermark_s, self.warmup_s)):
            raise ValueError("times in a plan must be seconds of at least 0")
        if not 0 <= self.tolerance_ms < float("inf"):
            raise ValueError(f"tolerance_ms {self.tolerance_ms} must be at least 0 milliseconds")


StoredPlan = Annotated[Plan, Stored(Plan.from_json, Plan.to_json)]
"""It is checked when it is read."""


def _tolerance_ms(spec: RolloutSpec, objectives: ObjectivesSpec | None) -> float:
    if spec.latency.tolerance_ms is not None:
        return spec.latency.tolerance_ms
    return _TOLERANCE * objectives.latency_ms if objectives else 0.0


def _slower(margin: float, tolerance_ms: float) -> str:
    return f"{margin:.0%} or {tolerance_ms:g} ms, whichever is more" if tolerance_ms else f"{margin:.0%}"
