"""How one rollout is to go: fixed when it starts, kept in its journal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Literal, Self

from serin.spec.stages import RolloutSpec

Mode = Literal["enforce", "hold", "observe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Times are seconds, steps and weights percent of traffic. The last step is always 100: the bake."""

    steps: tuple[float, ...] = (1.0, 5.0, 25.0, 50.0, 100.0)
    step_s: float = 30.0
    min_requests: int = 100
    max_error_share: float = 0.01
    bake_s: float = 600.0
    deadline_s: float = 3600.0
    mode: Mode = "enforce"
    load_s: float = 300.0  # a release that is not ready by then is given up
    drain_s: float = 30.0  # a release that still has requests then is stopped all the same
    unready_s: float = 2.0  # a process that lives but is not ready for this long counts as dead

    @classmethod
    def from_spec(cls, spec: RolloutSpec, *, load_s: float = 300.0, drain_s: float = 30.0) -> Self:
        """`drain_s` should be longer than the longest request."""
        return cls(
            steps=tuple(float(step) for step in spec.steps),
            step_s=spec.step_time,
            min_requests=spec.min_requests,
            max_error_share=spec.max_error_share,
            bake_s=spec.bake,
            deadline_s=spec.deadline,
            mode=spec.mode,
            load_s=load_s,
            drain_s=drain_s,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"steps": list(self.steps)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Unknown fields are refused, and so are numbers no rollout could follow: the value may come from a person."""
        known = {part.name for part in fields(cls)}
        if unknown := sorted(set(value) - known):
            raise ValueError(f"a plan has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        plan = cls(**{**value, "steps": tuple(float(step) for step in value.get("steps", cls().steps))})
        plan.check()
        return plan

    def check(self) -> None:
        """ValueError for a plan no rollout could follow."""
        steps = self.steps
        rising = all(low < high for low, high in pairwise(steps))
        if not steps or steps[0] <= 0 or steps[-1] != 100 or not rising:
            raise ValueError(f"steps {list(steps)} must rise from above 0 to 100")
        if self.mode not in ("enforce", "hold", "observe"):
            raise ValueError(f"mode {self.mode!r} is none of enforce, hold, observe")
        if not 0 <= self.max_error_share <= 1 or self.min_requests < 0:
            raise ValueError("max_error_share must lie in 0 .. 1 and min_requests must not be negative")
        spans = (self.step_s, self.bake_s, self.deadline_s, self.load_s, self.drain_s, self.unready_s)
        if not all(0 <= span < float("inf") for span in spans):
            raise ValueError("the times of a plan must be seconds, 0 or more")
