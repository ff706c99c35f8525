"""A claim of the field, what was measured about it, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["true", "false", "depends on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`cases`: whether the claim held in each, by what distinguishes them. `figures`: those of the last line."""

    name: str
    says: str
    cases: Mapping[str, bool]
    lines: Sequence[str]
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        held = set(self.cases.values())
        return "depends on" if len(held) > 1 else "true" if held == {True} else "false"

    def show(self) -> str:
        cases = ", ".join(f"{name}: {'yes' if held else 'no'}" for name, held in self.cases.items())
        return "\n".join(
            [f"{self.says}: {self.verdict} ({cases})", *(f"  {line}" for line in self.lines), ""]
        )
