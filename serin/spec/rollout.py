"""The section `rollout`: how a new version takes over the traffic."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from serin.spec.section import Duration, Section

SHADOW = "shadow"


class LatencySpec(Section):
    """When a candidate counts as slower than the live version: beyond the margin at one of the quantiles."""

    quantiles: tuple[float, ...] = Field(default=(0.5, 0.95, 0.99), min_length=1)
    """The quantiles of latency that are compared."""
    margin: float = Field(default=0.10, ge=0)
    """How much slower a candidate may be: 0.1 allows 10%."""
    bad_margin: float | None = None
    """Promotion needs evidence that the candidate is not slower by this much. By default twice the margin."""
    tolerance_ms: float | None = Field(default=None, ge=0)
    """A candidate that is slower by no more than this many milliseconds does not count as slower, whatever the margin.
    Promotion needs evidence against twice this, or against `bad_margin` where that is more. By default 2% of
    `objectives.latency_ms`. 0 turns it off."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if any(not 0 < quantile < 1 for quantile in self.quantiles):
            raise ValueError(
                f"{list(self.quantiles)}: quantiles must be between 0 and 1, such as [0.5, 0.95, 0.99]"
            )
        if self.bad_margin is not None and self.bad_margin <= self.margin:
            raise ValueError(f"bad_margin={self.bad_margin} must be larger than margin={self.margin}")
        return self


class ShadowSpec(Section):
    """The step `shadow`: recorded requests of the live version are sent to the candidate before it answers anybody."""

    rows: int = Field(default=1000, ge=1)
    """The number of recorded rows that the candidate must answer before the step can pass."""
    time: Duration = Field(default=30.0, ge=0)
    """How long the step lasts at least."""
    share: float = Field(default=0.2, gt=0, le=1)
    """How fast recorded requests are sent: as a share of the live version's requests per second. Where that is less
    than 20 per second, they are sent one after the other, at most 20 per second."""
    max_difference: float | None = Field(default=None, gt=0)
    """The largest mean absolute difference between the scores of the candidate and the live version on the same rows,
    as a share of the live version's mean score: 0.1 allows 10%. It holds for all rows together and for each segment
    (`export.segments`) with at least 50 rows. By default the difference is only shown."""


class RolloutSpec(Section):
    """How a new version takes over the traffic, step by step, and what rolls it back."""

    steps: tuple[float | Literal["shadow"], ...] = (1, 5, 25, 50, 100)
    """The candidate's share of the traffic at each step, in percent. They rise to 100. The first may be `shadow`: the
    candidate must answer recorded requests of the live version (`monitoring.capture`) as its bundle computes them,
    before any client reaches it."""
    shadow: ShadowSpec = Field(default=ShadowSpec(), exclude_if=lambda value: value == ShadowSpec())
    """What the candidate must do in the step `shadow`."""
    approve: tuple[float, ...] = ()
    """The steps that a person must approve, such as [100]."""
    step_time: Duration = Field(default=30.0, ge=0)
    """How long each step lasts at least."""
    min_requests: int = Field(default=100, ge=0)
    """The number of the candidate's requests that must be judged before a step can pass. 0 goes by time alone."""
    false_rollback: float = Field(default=0.01, gt=0, le=0.5)
    """The largest probability that a candidate that is not worse is rolled back."""
    false_promotion: float = Field(default=0.05, gt=0, le=0.5)
    """The largest probability that a candidate that is slower by `latency.bad_margin` gets all traffic."""
    latency: LatencySpec = LatencySpec()
    """When a candidate counts as slower."""
    error_tolerance: float = Field(default=1.0, ge=1)
    """How many times as often as the live version the candidate may fail."""
    warmup: Duration = Field(default=10.0, ge=0)
    """How long the candidate's latencies are not compared after its first traffic, because its caches are cold."""
    bake: Duration = Field(default=600.0, ge=0)
    """How long the old version stays warm after the candidate has taken all traffic."""
    deadline: Duration = Field(default=3600.0, gt=0)
    """A step that has not passed after this time holds the rollout and asks for a person."""
    mode: Literal["enforce", "hold", "observe"] = "enforce"
    """What a failed judgement does: roll back (`enforce`), stop and ask (`hold`), or only be recorded (`observe`)."""
    second_opinion: bool = False
    """Restart a candidate that is judged slower but keeps every promise, and judge it again before rolling it back.
    For machines on which a process may be slow by chance for minutes; it doubles the time to a rollback."""
    baseline: bool = False
    """At steps below 50, compare the candidate with a second process of the live version that gets the same share of
    the traffic. Without it, compare with an equal number of the live version's requests, drawn at random."""

    @field_validator("steps")
    @classmethod
    def _rise_to_all(cls, steps: tuple[float | Literal["shadow"], ...]) -> tuple[float | str, ...]:
        if SHADOW in steps[1:]:
            raise ValueError(
                f"{list(steps)}: shadow comes once, as the first step, such as [shadow, 1, 10, 50, 100]"
            )
        shares = _shares(steps)
        if not shares or shares[-1] != 100 or shares[0] <= 0 or any(a >= b for a, b in pairwise(shares)):
            raise ValueError(
                f"{list(steps)}: the steps must increase, start above 0 and end with 100, such as [1, 5, 25, 50, 100]"
            )
        return steps

    @property
    def shares(self) -> tuple[float, ...]:
        """The steps in which the candidate has traffic, in percent."""
        return _shares(self.steps)

    @property
    def has_shadow(self) -> bool:
        return self.steps[0] == SHADOW

    @model_validator(mode="after")
    def _has_use_for_a_shadow(self) -> Self:
        if self.shadow != ShadowSpec() and not self.has_shadow:
            raise ValueError(
                f"shadow is set, but the steps {list(self.steps)} do not begin with shadow; write "
                f"steps: [shadow, {', '.join(f'{step:g}' for step in self.shares)}], or leave shadow out"
            )
        return self

    @model_validator(mode="after")
    def _approves_its_own_steps(self) -> Self:
        if unknown := sorted(set(self.approve) - set(self.shares)):
            raise ValueError(f"approve names {unknown}, which are none of the steps {list(self.shares)}")
        return self

    @model_validator(mode="after")
    def _has_use_for_a_baseline(self) -> Self:
        if self.baseline and self.shares[0] >= 50:
            raise ValueError(
                f"baseline: no step of {list(self.steps)} is below 50, and from there on the live version is the "
                "candidate's equal; begin with a smaller step, or leave baseline out"
            )
        return self


def _shares(steps: tuple[float | str, ...]) -> tuple[float, ...]:
    return tuple(step for step in steps if not isinstance(step, str))
