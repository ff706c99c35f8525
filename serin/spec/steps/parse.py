"""From the spec's notation to steps and back."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from serin.spec.steps.operators import load_class, load_operator, operator_named
from serin.spec.steps.step import NUMBERS, FeatureStep, Made


class Own(FeatureStep):
    """A user's plain class as an operator; docs/how-to/features.md has its contract."""

    name = "own"
    on_gpu = False
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
        """A new instance, with these arguments."""
        return load_operator(self.path, self.arguments)

    @property
    def import_path(self) -> str:
        return self.path

    @property
    def made(self) -> Made:
        return "numbers" if self.operator.makes == "numeric" else "codes"

    @property
    def can_follow(self) -> tuple[Made, ...]:
        return ("raw", "numbers") if self.operator.reads == "numbers" else ("raw",)

    @property
    def reads_times(self) -> bool:
        return False

    @property
    def is_exact(self) -> bool:
        return bool(getattr(self.operator, "exact", True))

    def accepted(self) -> tuple[str, ...]:
        return NUMBERS if self.operator.reads == "numbers" else tuple(self.operator.accepts)


def parse_step(value: Any) -> FeatureStep:
    """`normalize`, `clip: {q: [0.01, 0.99]}`, `date_parts: [hour]` or `module:Class` -> the step."""
    arguments: Any
    if isinstance(value, FeatureStep):
        return value
    if isinstance(value, str):
        name, arguments = value, None
    elif isinstance(value, dict) and len(value) == 1:
        ((name, arguments),) = value.items()
    else:
        raise ValueError(f"a step is a name or a single `name: arguments`, not {value!r}")
    kind = load_class(str(name)) if ":" in str(name) else operator_named(str(name))
    if arguments is None:
        arguments = {}
    is_step = issubclass(kind, FeatureStep)
    if not isinstance(arguments, dict):
        if not is_step:
            raise ValueError(f"{name} takes named arguments, not {arguments!r}")
        if kind.positional is None:
            raise ValueError(f"{name} takes named arguments: {{{', '.join(kind.model_fields)}}}")
        arguments = {kind.positional: arguments}
    return kind.model_validate(arguments) if is_step else Own(path=str(name), arguments=arguments)


def dump_step(step: FeatureStep) -> Any:
    """The step in the spec's notation."""
    if isinstance(step, Own):
        return {step.path: dict(step.arguments)} if step.arguments else step.path
    arguments = step.model_dump(mode="json", exclude_defaults=True)
    return {step.label: arguments} if arguments else step.label
