"""The section `features`: which columns become features, and by which steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, SerializeAsAny, model_validator

from serin.spec.section import Section
from serin.spec.steps.operators import fingerprint
from serin.spec.steps.parse import dump_step, parse_step
from serin.spec.steps.step import FeatureStep

StepField = Annotated[
    SerializeAsAny[FeatureStep],
    BeforeValidator(parse_step),
    PlainSerializer(dump_step, return_type=Any),
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
        return self.columns if self.steps[0].reads_times else ()

    @property
    def operators(self) -> dict[str, str]:
        """The user's own operators, and what tells their versions apart."""
        return {path: fingerprint(path) for step in self.steps if (path := step.import_path)}

    def outputs(self, column: str) -> tuple[tuple[Makes, str], ...]:
        """What the steps make of a column, as far as it is known before they are fitted."""
        names: tuple[str, ...] = (column,)
        beside: list[tuple[Makes, str]] = []
        for step in self.steps:
            beside += [("numeric", indicator) for name in names for indicator in step.beside(name)]
            names = tuple(made for name in names for made in step.names(name))
        return (*((self.makes, name) for name in names), *beside)

    def _keys(self) -> tuple[str, ...]:
        return tuple(key for step in self.steps for key in step.served_by)

    @model_validator(mode="after")
    def _steps_fit_together(self) -> Self:
        if "raw" not in self.steps[0].can_follow:
            raise ValueError(f"{self.steps[0].label} cannot come first")
        for before, step in pairwise(self.steps):
            if before.made not in step.can_follow:
                raise ValueError(_misfit(before, step))
        self._check_fills()
        self._check_exactness()
        keyed = [step.label for step in self.steps if step.served_by]
        if len(keyed) > 1:
            raise ValueError(f"{keyed[1]} cannot follow {keyed[0]}; put it into another feature")
        if len(set(self.columns)) < len(self.columns):
            raise ValueError("`columns` names a column twice; name each once")
        return self

    def _check_fills(self) -> None:
        earlier: FeatureStep | None = None
        indicator = False
        for step in self.steps:
            indicates = bool(step.beside(""))
            if step.fills and earlier is not None:
                raise ValueError(f"nothing is null after {earlier.label}; take {step.label} out")
            if indicates and indicator:
                raise ValueError("two fills would make the same indicator; leave one indicator out")
            indicator = indicator or indicates
            if step.fills:
                earlier = step
            elif not step.monotone:  # what it makes may be null again
                earlier = None
            if step.served_by and indicator:
                raise ValueError(
                    f"an indicator describes the column itself, which {step.label} does not need from clients; "
                    "put the fill with its indicator into another feature"
                )

    def _check_exactness(self) -> None:
        """A code must be the same everywhere, so it cannot depend on a number that may differ in its last bit; and a
        sine would amplify that bit."""
        inexact = None
        for step in self.steps:
            if inexact is not None and step.needs_exact:
                raise ValueError(
                    f"{step.label} after {inexact.label}: a logarithm or a sine may differ in its last bit between "
                    f"machines, and what is made of it must not; {_instead(inexact, step)}"
                )
            inexact = inexact or (None if step.is_exact else step)


def _instead(inexact: FeatureStep, step: FeatureStep) -> str:
    if inexact.monotone:
        return f"take {inexact.label} out: {step.label} makes as much of the numbers without it"
    return f"put {step.label} into another feature"


def _misfit(before: FeatureStep, step: FeatureStep) -> str:
    if before.made == "end":
        return f"nothing can follow {before.label}; take {step.label} out or put it before"
    made = {"numbers": "numbers", "codes": "codes", "raw": "the column itself"}
    wanted = " or ".join(made[each] for each in step.can_follow if each in made)
    advice = "take the other steps out or put them into another feature"
    if before.made == "codes":
        return (
            f"{before.label} makes codes, and {step.label} needs {wanted}; only one_hot may follow; {advice}"
        )
    return f"{before.label} makes numbers, and {step.label} needs {wanted}; {advice}"
