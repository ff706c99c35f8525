"""The base class of the steps of features."""

from __future__ import annotations

from typing import ClassVar, Literal

from serin.spec.section import Section

Made = Literal["raw", "numbers", "codes", "end"]


class Step(Section):
    """One step of a feature: a name with arguments."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    """The kinds of columns that it can start with."""
    follows: ClassVar[tuple[Made, ...]] = ("raw",)
    """What it can be applied to."""
    gives: ClassVar[Made] = "numbers"
    """What it makes."""
    exact: ClassVar[bool] = True
    """Whether its result is the same to the last bit on every machine."""
    positional: ClassVar[str | None] = None
    """The key that is meant by `step: value` instead of `step: {key: value}`."""

    @property
    def label(self) -> str:
        """How the spec calls it."""
        return self.name

    @property
    def made(self) -> Made:
        return self.gives

    @property
    def can_follow(self) -> tuple[Made, ...]:
        return self.follows

    @property
    def is_exact(self) -> bool:
        return self.exact

    def accepted(self) -> tuple[str, ...]:
        return self.kinds

    def names(self, name: str) -> tuple[str, ...]:
        """What its outputs are called, made of something called `name`; one_hot knows only how they begin."""
        return (name,)
