"""The section `data.split`: how rows are divided into train, valid and test."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from serin.spec.section import Duration, Section


class SplitSpec(Section):
    """How rows are divided into train, valid and test. The three shares add up to 1."""

    train: float = Field(default=0.8, gt=0, lt=1)
    """The share of rows to train on."""
    valid: float = Field(default=0.1, gt=0, lt=1)
    """The share of rows that chooses the best epoch."""
    test: float = Field(default=0.1, gt=0, lt=1)
    """The share of rows that measures the finished model."""
    kind: Literal["auto", "temporal", "group", "stratified", "random"] = "auto"
    """How rows are assigned: `temporal` (the earliest rows train), `group` (rows with the same `group` stay together),
    `stratified` (each class in the same shares) or `random` (by a hash of the row). `auto` means group when `group` is
    set, temporal when `data.time` is, and random otherwise."""
    group: str | None = None
    """The column whose equal values stay in one split."""
    gap: Duration = Field(default=0.0, ge=0)
    """How much time is left out before valid and before test (temporal)."""

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
