"""What the gate found out about one variant: a line of gate.json, of the card and of the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """Times are medians in microseconds, by rows in a batch, with one thread. `drop`: of the budget's metric against
    fp32, on `test_rows` rows (fewer for one that is far too slow). `segments`: the drop in each, worst first."""

    name: str
    status: Literal["chosen", "passed", "rejected", "unavailable"]
    reason: str = ""
    node: str | None = None  # where it first leaves fp32
    bytes: int | None = None
    flops: int | None = None  # for one row
    latency_us: dict[int, float] = field(default_factory=dict)
    mix_us: float | None = None  # mean over the batch mix
    largest_score_difference: float | None = None
    test_rows: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    drop: float | None = None
    segments: dict[str, float] = field(default_factory=dict)
