"""The steps a feature may take, as the spec writes them. What they do is in serin/features, one file per step."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from serin.errors import nearest
from serin.spec.section import Section


class Step(Section):
    name: ClassVar[str]
    makes: ClassVar[Literal["numeric", "categorical"]]
    positional: ClassVar[str | None] = None  # the key meant by `step: value` instead of `step: {key: value}`


class FillMedian(Step):
    """Nulls become the training split's median."""

    name = "fill_median"
    makes = "numeric"


class Clip(Step):
    """Values are kept within fixed bounds (`min`, `max`) or within quantiles of the training split (`q`)."""

    name = "clip"
    makes = "numeric"
    min: float | None = None
    max: float | None = None
    q: tuple[float, float] | None = None

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> Self:
        if (self.q is None) == (self.min is None and self.max is None):
            raise ValueError("give either q: [low, high] or min and/or max")
        if self.q is not None and not 0 <= self.q[0] < self.q[1] <= 1:
            raise ValueError(
                f"q={list(self.q)} must be two rising numbers between 0 and 1, such as [0.001, 0.999]"
            )
        if self.min is not None and self.max is not None and self.min >= self.max:
            raise ValueError(f"min={self.min:g} must be below max={self.max:g}")
        return self


class Normalize(Step):
    """Mean 0 and standard deviation 1 on the training split. A null stays null: fill it first."""

    name = "normalize"
    makes = "numeric"


class Categorify(Step):
    """Codes: 0 null, then `buckets` codes for what is out of vocabulary, then the vocabulary by descending count."""

    name = "categorify"
    makes = "categorical"
    min_count: int = Field(default=1, ge=1)
    max_size: int | None = Field(default=None, ge=1)
    buckets: int = Field(default=1, ge=1)


Part = Literal["minute", "hour", "weekday", "day", "month", "quarter"]


class DateParts(Step):
    """Parts of a time (UTC) as categories; 0 is null."""

    name = "date_parts"
    makes = "categorical"
    positional = "parts"
    parts: tuple[Part, ...] = Field(default=("hour", "weekday"), min_length=1)


STEPS: dict[str, type[Step]] = {
    step.name: step for step in (FillMedian, Clip, Normalize, Categorify, DateParts)
}


def parse_step(value: Any) -> Step:
    """`normalize`, `clip: {q: [0.01, 0.99]}` or `date_parts: [hour]` -> the step."""
    arguments: Any
    if isinstance(value, Step):
        return value
    if isinstance(value, str):
        name, arguments = value, None
    elif isinstance(value, dict) and len(value) == 1:
        ((name, arguments),) = value.items()
    else:
        raise ValueError(f"a step is a name or a single `name: arguments`, not {value!r}")
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
    arguments = step.model_dump(mode="json", exclude_defaults=True)
    return {step.name: arguments} if arguments else step.name
