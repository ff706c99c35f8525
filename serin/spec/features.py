"""The section `features`: which columns become features, and by which steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, SerializeAsAny, model_validator

from serin.spec.own import fingerprint
from serin.spec.parse_steps import Own, dump_step, parse_step
from serin.spec.section import Section
from serin.spec.step import Step
from serin.spec.steps import Cyclical, DateParts, FillStep, GroupStats, NumberStep

StepField = Annotated[
    SerializeAsAny[Step], BeforeValidator(parse_step), PlainSerializer(dump_step, return_type=Any)
]
Makes = Literal["numeric", "categorical"]


class FeatureSpec(Section):
    """Columns that become features by the same steps."""

    columns: tuple[str, ...] = Field(min_length=1)
    """The columns. Each of them goes through the steps separately."""
    steps: tuple[StepField, ...] = Field(min_length=1)
    """The steps, in order: a name (`normalize`), a name with arguments (`clip: {q: [0.01, 0.99]}`) or your own operator
    (`package.module:Class`)."""

    @property
    def makes(self) -> Makes:
        return "categorical" if self.steps[-1].made == "codes" else "numeric"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that are needed to fit it."""
        return tuple(dict.fromkeys([*self.columns, *self._keys()]))

    @property
    def served(self) -> tuple[str, ...]:
        """The columns that are needed to make it, in training and in requests: statistics need their key alone."""
        return self._keys()[-1:] or self.columns

    @property
    def times(self) -> tuple[str, ...]:
        """The columns that are read as times, even if they hold text."""
        first = self.steps[0]
        reads_times = isinstance(first, DateParts) or (
            isinstance(first, Cyclical) and first.parts is not None
        )
        return self.columns if reads_times else ()

    @property
    def operators(self) -> dict[str, str]:
        """The user's own operators, and what tells their versions apart."""
        return {step.path: fingerprint(step.path) for step in self.steps if isinstance(step, Own)}

    def outputs(self, column: str) -> tuple[tuple[Makes, str], ...]:
        """What the steps make of a column, as far as it is known before they are fitted."""
        names: tuple[str, ...] = (column,)
        beside: list[tuple[Makes, str]] = []
        for step in self.steps:
            if isinstance(step, FillStep) and step.indicator:
                beside += [("numeric", f"{name}_missing") for name in names]
            names = tuple(made for name in names for made in step.names(name))
        return (*((self.makes, name) for name in names), *beside)

    def _keys(self) -> tuple[str, ...]:
        return tuple(step.by for step in self.steps if isinstance(step, GroupStats))

    @model_validator(mode="after")
    def _steps_fit_together(self) -> Self:
        if "raw" not in self.steps[0].can_follow:
            raise ValueError(f"{self.steps[0].label} cannot come first")
        for before, step in pairwise(self.steps):
            if before.made not in step.can_follow:
                raise ValueError(_misfit(before, step))
        self._check_fills()
        self._check_exactness()
        if len(self._keys()) > 1:
            raise ValueError("group_stats stands twice; give each a feature of its own")
        if len(set(self.columns)) < len(self.columns):
            raise ValueError("a column stands twice in `columns`; name each once")
        return self

    def _check_fills(self) -> None:
        earlier: Step | None = None
        indicator = False
        for step in self.steps:
            if isinstance(step, FillStep):
                if earlier is not None:
                    raise ValueError(f"nothing is null after {earlier.label}; take {step.label} out")
                if indicator and step.indicator:
                    raise ValueError("two fills would make the same indicator; leave one indicator out")
                earlier, indicator = step, indicator or step.indicator
            elif not isinstance(step, NumberStep):  # what it makes may be null again
                earlier = None
            if isinstance(step, GroupStats) and indicator:
                raise ValueError(
                    "an indicator tells of the column itself, which group_stats do not need from clients; "
                    "give the fill with its indicator a feature of its own"
                )

    def _check_exactness(self) -> None:
        """A code must be the same everywhere, so it cannot rest on a number that may differ in its last bit; and a
        sine would make more of that bit."""
        inexact = None
        for step in self.steps:
            if inexact is not None and (step.made == "codes" or isinstance(step, Cyclical)):
                raise ValueError(
                    f"{step.label} after {inexact.label}: a logarithm or a sine may differ in its last bit between "
                    f"machines, and what is made of it must not; {_instead(inexact, step)}"
                )
            inexact = inexact or (None if step.is_exact else step)


def _instead(inexact: Step, step: Step) -> str:
    if inexact.name == "log1p":
        return f"take log1p out: {step.label} makes as much of the numbers as they are"
    return f"put {step.label} into a feature of its own"


def _misfit(before: Step, step: Step) -> str:
    if before.made == "end":
        return f"nothing can follow {before.label}; take {step.label} out or put it before"
    made = {"numbers": "numbers", "codes": "codes", "raw": "the column itself"}
    wanted = " or ".join(made[each] for each in step.can_follow if each in made)
    advice = "take the other steps out or give them a feature of their own"
    if before.made == "codes":
        return (
            f"{before.label} makes codes, and {step.label} needs {wanted}; only one_hot may follow; {advice}"
        )
    return f"{before.label} makes numbers, and {step.label} needs {wanted}; {advice}"
