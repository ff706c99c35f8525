"""From the spec's notation to steps and back."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from serin.errors import nearest
from serin.spec import steps
from serin.spec.own import load_operator
from serin.spec.step import Made, Step
from serin.spec.steps import NUMBERS


class Own(Step):
    """A user's own operator; docs/how-to/features.md has its contract."""

    name = "own"
    path: str
    """The import path of the class, `package.module:Class`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """The arguments of the class."""

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        load_operator(self.path, self.arguments)
        return self

    @property
    def operator(self) -> Any:
        """A new one, with these arguments."""
        return load_operator(self.path, self.arguments)

    @property
    def label(self) -> str:
        return self.path

    @property
    def made(self) -> Made:
        return "numbers" if self.operator.makes == "numeric" else "codes"

    @property
    def can_follow(self) -> tuple[Made, ...]:
        return ("raw", "numbers") if self.operator.reads == "numbers" else ("raw",)

    @property
    def is_exact(self) -> bool:
        return bool(getattr(self.operator, "exact", True))

    def accepted(self) -> tuple[str, ...]:
        return NUMBERS if self.operator.reads == "numbers" else tuple(self.operator.accepts)


STEPS: dict[str, type[Step]] = {
    step.name: step
    for step in (
        steps.FillMissing, steps.FillMedian, steps.FillMode, steps.Clip, steps.Log1p, steps.Normalize, steps.MinMax,
        steps.RobustScale, steps.Bucketize, steps.Categorify, steps.HashBucket, steps.Ordinal, steps.OneHot,
        steps.CountEncode, steps.TargetEncode, steps.GroupStats, steps.DateParts, steps.Cyclical,
    )
}  # fmt: skip


def parse_step(value: Any) -> Step:
    """`normalize`, `clip: {q: [0.01, 0.99]}`, `date_parts: [hour]` or `module:Class` -> the step."""
    arguments: Any
    if isinstance(value, Step):
        return value
    if isinstance(value, str):
        name, arguments = value, None
    elif isinstance(value, dict) and len(value) == 1:
        ((name, arguments),) = value.items()
    else:
        raise ValueError(f"a step is a name or a single `name: arguments`, not {value!r}")
    if ":" in str(name):
        if not isinstance(arguments, dict | None):
            raise ValueError(f"{name} takes named arguments, not {arguments!r}")
        return Own(path=str(name), arguments=arguments or {})
    if name not in STEPS:
        raise ValueError(f"unknown step {name!r}{nearest(str(name), STEPS)}")
    kind = STEPS[name]
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        if kind.positional is None:
            raise ValueError(f"{name} takes named arguments: {{{', '.join(kind.model_fields)}}}")
        arguments = {kind.positional: arguments}
    return kind.model_validate(arguments)


def dump_step(step: Step) -> Any:
    if isinstance(step, Own):
        return {step.path: dict(step.arguments)} if step.arguments else step.path
    arguments = step.model_dump(mode="json", exclude_defaults=True)
    return {step.name: arguments} if arguments else step.name
