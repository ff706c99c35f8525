"""What every step of the spec is."""

from __future__ import annotations

from typing import ClassVar, Literal

from serin.spec.section import Section

Made = Literal["raw", "numbers", "codes", "end"]


class Step(Section):
    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]  # of a column it can begin with
    follows: ClassVar[tuple[Made, ...]] = ("raw",)
    gives: ClassVar[Made] = "numbers"
    exact: ClassVar[bool] = True
    positional: ClassVar[str | None] = None  # the key meant by `step: value` instead of `step: {key: value}`

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
