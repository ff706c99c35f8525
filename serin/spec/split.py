"""Which share of the rows trains, validates and tests, and by what they are told apart."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from serin.spec.section import Duration, Section


class SplitSpec(Section):
    """temporal: the earliest rows train; group: rows with the same `group` stay together; stratified: each class in
    the same shares; random: by a hash of the row. auto: temporal when data.time is set, group when `group` is, else
    random."""

    train: float = Field(default=0.8, gt=0, lt=1)
    valid: float = Field(default=0.1, gt=0, lt=1)
    test: float = Field(default=0.1, gt=0, lt=1)
    kind: Literal["auto", "temporal", "group", "stratified", "random"] = "auto"
    group: str | None = None
    gap: Duration = Field(default=0.0, ge=0)  # so much time before valid and before test is left out

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        total = self.train + self.valid + self.test
        if abs(total - 1) > 1e-9:
            raise ValueError(f"train + valid + test = {total:g}; they must add up to 1")
        return self

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        if self.kind == "group" and self.group is None:
            raise ValueError("kind: group needs `group: column`, whose rows stay together")
        if self.kind not in ("auto", "group") and self.group is not None:
            raise ValueError(f"`group` has no meaning for kind: {self.kind}; take it out, or use kind: group")
        if self.kind not in ("auto", "temporal") and self.gap:
            raise ValueError(
                f"`gap` has no meaning for kind: {self.kind}; take it out, or use kind: temporal"
            )
        return self
