"""The base class of every step of a feature: what a step reads and makes, as far as the spec needs to know it.

What a step does is defined by its subclasses, the operators in serin/features/ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from serin.spec.section import Section

Made = Literal["raw", "numbers", "codes", "end"]

OPERATORS = "serin.features.ops"
"""The package of Serin's operators; one that is defined elsewhere is named by its import path."""
NUMBERS, VALUES, TIMES = ("float", "int", "bool"), ("string", "int", "bool"), ("timestamp",)


class FeatureStep(Section):
    """One step of a feature."""

    name: ClassVar[str]
    """The step's name in a spec."""
    kinds: ClassVar[tuple[str, ...]]
    """The kinds of columns that it can begin with."""
    follows: ClassVar[tuple[Made, ...]] = ("raw",)
    """What it can work on: the column itself, or what the step before it makes."""
    gives: ClassVar[Made] = "numbers"
    """What it leaves to the next step; nothing can follow `end`."""
    exact: ClassVar[bool] = True
    """Whether it needs no more than + - * /, comparisons and lookups, which give the same bits on every machine."""
    monotone: ClassVar[bool] = False
    """Whether it maps each number to one number, without reversing their order and without making nulls."""
    keeps_unit: ClassVar[bool] = False
    """Whether numbers have the same unit after it as before."""
    fills: ClassVar[bool] = False
    """Whether nothing is null after it."""
    on_gpu: ClassVar[bool] = True
    """Whether it works on cupy arrays; if not, its columns are brought to the host."""
    positional: ClassVar[str | None] = None
    """The key that is meant by `step: value` instead of `step: {key: value}`."""

    @property
    def import_path(self) -> str | None:
        """`module:Class` of an operator outside Serin; None for Serin's own."""
        kind = type(self)
        return (
            None if kind.__module__.startswith(f"{OPERATORS}.") else f"{kind.__module__}:{kind.__qualname__}"
        )

    @property
    def label(self) -> str:
        """The step as the spec names it."""
        return self.import_path or self.name

    @property
    def made(self) -> Made:
        """What it leaves to the next step."""
        return self.gives

    @property
    def can_follow(self) -> tuple[Made, ...]:
        """What it can work on."""
        return self.follows

    @property
    def reads_numbers(self) -> bool:
        """Whether it reads a column as numbers where it comes first."""
        return "numbers" in self.can_follow

    @property
    def reads_times(self) -> bool:
        """Whether it reads a column as times, even if the column holds text."""
        return self.accepted() == TIMES

    @property
    def is_exact(self) -> bool:
        """Whether it makes the same bits on every machine."""
        return self.exact

    @property
    def needs_exact(self) -> bool:
        """Whether what it works on must be the same bits on every machine."""
        return self.made == "codes"

    @property
    def served_by(self) -> tuple[str, ...]:
        """The columns that it is served by, instead of the feature's own."""
        return ()

    @property
    def shared(self) -> bool:
        """Whether it is fitted once for all columns of the feature."""
        return False

    def accepted(self) -> tuple[str, ...]:
        """The kinds of columns that it can begin with."""
        return self.kinds

    def names(self, name: str) -> tuple[str, ...]:
        """The names of its outputs for an input called `name`; one_hot knows only how they begin."""
        return (name,)

    def beside(self, name: str) -> tuple[str, ...]:
        """The names of indicators that it adds for an input called `name`: 1 where that was null, else 0."""
        del name
        return ()

    def misfit(self, kind: str) -> str | None:
        """What prevents it from working on a column of a kind that it accepts."""
        del kind
        return None

    def misfits(self, columns: Sequence[str], kinds: Mapping[str, str]) -> Iterator[str]:
        """What prevents it from working on these columns together, or with the columns it names itself."""
        del columns, kinds
        return iter(())
